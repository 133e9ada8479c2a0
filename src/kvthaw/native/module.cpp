// The extension's face to Python: tensors come as addresses, which __init__.py has checked. No call holds the GIL while it works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "admit.h"
#include "checksum.h"
#include "forest.h"
#include "gather.h"
#include "pool.h"

namespace nb = nanobind;
using namespace kvthaw;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const Kernels& kernels_named(int isa) {  // -1: the best of this machine
    const Kernels* found = isa < 0 ? best_kernels() : find_kernels(static_cast<Isa>(isa));
    if (found == nullptr) throw std::invalid_argument("this machine or build has no such instruction set");
    return *found;
}

class Memory {  // of an object of Python, which stays where it is as long as this lives
   public:
    explicit Memory(nb::handle of) {
        if (PyObject_GetBuffer(of.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    Memory(const Memory&) = delete;
    ~Memory() { PyBuffer_Release(&view_); }
    const uint8_t* start() const { return static_cast<const uint8_t*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

   private:
    Py_buffer view_;
};

constexpr auto kFree = nb::call_guard<nb::gil_scoped_release>();

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);
    m.def("best_isa", [] { return static_cast<int>(best_kernels()->isa); });
    m.def("has_isa", [](int isa) { return find_kernels(static_cast<Isa>(isa)) != nullptr; });
    m.def("cores", &Pool::cores);
    nb::class_<Checksum>(m, "Checksum")
        .def(nb::init<>())
        .def("update",
             [](Checksum& self, nb::handle data) {
                 const Memory memory(data);
                 nb::gil_scoped_release free;
                 self.update(memory.start(), memory.size());
             })
        .def("read",
             [](Checksum& self, int file, uintptr_t parts, size_t count) { return self.read(file, at<const int64_t>(parts), count); },
             kFree)
        .def("digest", &Checksum::digest);
    m.def(
        "gather_rows",
        [](uintptr_t bases, int blocks, int block_size, size_t row_bytes, int batch, int heads, int width, uintptr_t rows, uintptr_t out,
           uintptr_t where, int threads) {
            return gather_rows(at<const int64_t>(bases), blocks, block_size, row_bytes, batch, heads, width, at<const int32_t>(rows),
                               at<char>(out), at<int64_t>(where), threads);
        },
        kFree);
    m.def(
        "admit",
        [](size_t pairs, int width, int capacity, int places, uintptr_t rows, uintptr_t row_slot, uintptr_t slot_row, uintptr_t used,
           uintptr_t counts, uintptr_t slots, uintptr_t fetch, uintptr_t live) {
            admit(pairs, width, capacity, places, at<const int32_t>(rows), at<int32_t>(row_slot), at<int32_t>(slot_row),
                  at<int32_t>(used), at<int64_t>(counts), at<int32_t>(slots), at<int32_t>(fetch), at<bool>(live));
        },
        kFree);
    m.def(
        "dots",
        [](uintptr_t query, uintptr_t rows, size_t count, size_t stride, int dim, int dtype, uintptr_t out, int isa) {
            std::vector<const void*> from(count);
            for (size_t i = 0; i < count; ++i) from[i] = at<const char>(rows) + i * stride;
            kernels_named(isa).dots(at<const float>(query), from.data(), count, dim, static_cast<Dtype>(dtype), at<float>(out));
        },
        kFree);
    m.def(
        "dots_together",
        [](uintptr_t queries, int many, uintptr_t rows, int count, int dim, uintptr_t out, int isa) {
            std::vector<const float*> from(many);
            std::vector<float*> to(many);
            for (int q = 0; q < many; ++q) {
                from[q] = at<const float>(queries) + static_cast<size_t>(q) * dim;
                to[q] = at<float>(out) + static_cast<size_t>(q) * count;
            }
            const RowBlock block{at<const char>(rows), count, (1u << many) - 1};
            kernels_named(isa).dots_together(from.data(), many, &block, 1, dim, to.data());
        },
        kFree);
    m.def(
        "log_sum_exp",
        [](uintptr_t x, size_t count, float scale, int isa) { return kernels_named(isa).log_sum_exp(at<float>(x), count, scale); },
        kFree);

    nb::class_<Effort>(m, "Effort")
        .def(nb::init<int, double, int>(), nb::kw_only(), nb::arg("keep"), nb::arg("retrieve"), nb::arg("batch"));
    nb::class_<Settings>(m, "TreeSettings")
        .def(nb::init<>())
        .def_rw("dim", &Settings::dim)
        .def_rw("layer", &Settings::layer)
        .def_rw("page_size", &Settings::page_size)
        .def_rw("composites", &Settings::composites)
        .def_rw("simples", &Settings::simples)
        .def_rw("promote", &Settings::promote)
        .def_rw("promote_higher", &Settings::promote_higher)
        .def_rw("in_order", &Settings::in_order)
        .def_rw("seed", &Settings::seed)
        .def_rw("query", &Settings::query)
        .def_rw("insert", &Settings::insert)
        .def_rw("build", &Settings::build)
        .def_rw("query_beam_share", &Settings::query_beam_share)
        .def_rw("outliers", &Settings::outliers)
        .def_rw("spread", &Settings::spread)
        .def_rw("scale", &Settings::scale)
        .def_rw("first_head", &Settings::first_head)
        .def_rw("strict", &Settings::strict)
        .def_prop_rw("unit", [](const Settings& s) { return static_cast<int>(s.unit); },
                     [](Settings& s, int unit) { s.unit = static_cast<Unit>(unit); })
        .def_prop_rw("merge", [](const Settings& s) { return static_cast<int>(s.merge); },
                     [](Settings& s, int merge) { s.merge = static_cast<Merge>(merge); })
        .def_prop_rw("descend", [](const Settings& s) { return static_cast<int>(s.descend); },
                     [](Settings& s, int descend) { s.descend = static_cast<Descend>(descend); })
        .def_prop_rw("dtype", [](const Settings& s) { return static_cast<int>(s.dtype); },
                     [](Settings& s, int dtype) { s.dtype = static_cast<Dtype>(dtype); });
    nb::class_<Forest>(m, "Forest")
        .def(
            "__init__",
            [](Forest* self, const Settings& given, int seqs, int heads, int block_size, uintptr_t directions, int isa) {
                Settings settings = given;
                if (!settings.digests()) settings.outliers = 0;
                settings.kernels = &kernels_named(isa);
                const auto* from = at<const float>(directions);
                settings.directions.assign(from, from + static_cast<size_t>(heads) * settings.indices() * (settings.dim + 1));
                new (self) Forest(std::move(settings), seqs, heads, block_size);
            },
            nb::arg("settings"), nb::kw_only(), nb::arg("seqs"), nb::arg("heads"), nb::arg("block_size"), nb::arg("directions"),
            nb::arg("isa"))
        .def("copy", [](const Forest& self) { return new Forest(self); }, nb::rv_policy::take_ownership)
        .def_prop_ro("heads", &Forest::heads)
        .def("nbytes", &Forest::nbytes)
        .def("products", &Forest::products)
        .def("search_ns", &Forest::search_ns)
        .def(
            "check", [](const Forest& self, uintptr_t bases, int blocks) { return self.check(at<const int64_t>(bases), blocks); },
            kFree)
        .def("digests",
             [](const Forest& self, int seq, int head, uintptr_t spread, uintptr_t rows, uintptr_t outliers) {
                 self.tree(seq, head).save_digests(at<float>(spread), at<float>(rows), at<int32_t>(outliers));
             })
        .def("has", &Forest::has)
        .def("size", [](const Forest& self, int seq) { return self.has(seq) ? self.tree(seq, 0).size() : 0; })
        .def("first", [](const Forest& self, int seq) { return self.has(seq) ? self.tree(seq, 0).first() : 0; })
        .def(
            "build",
            [](Forest& self, int seq, int first, int points, uintptr_t bases, int threads) {
                self.build(seq, first, points, at<const int64_t>(bases), threads);
            },
            kFree)
        .def(
            "append",
            [](Forest& self, const std::vector<int>& seqs, int points, uintptr_t bases, int blocks, int threads) {
                self.append(seqs, points, at<const int64_t>(bases), blocks, threads);
            },
            kFree)
        .def(
            "select",
            [](const Forest& self, int batch, int group, uintptr_t query, int budget, uintptr_t bases, int blocks, uintptr_t rows,
               uintptr_t counts, int threads) {
                self.select(batch, group, at<const float>(query), budget, at<const int64_t>(bases), blocks, at<int32_t>(rows),
                            at<int32_t>(counts), threads);
            },
            kFree)
        .def(
            "truncate",
            [](Forest& self, int seq, int length, uintptr_t bases) { self.truncate(seq, length, at<const int64_t>(bases)); }, kFree)
        .def("reorder", &Forest::reorder, kFree)
        .def("share", &Forest::share, kFree)
        .def("pages", [](const Forest& self, int seq, int head) { return self.tree(seq, head).page_total(); })
        .def("save",
             [](const Forest& self, int seq, int head, uintptr_t radius2, uintptr_t page_node, uintptr_t page_count, uintptr_t members) {
                 self.tree(seq, head).save(at<double>(radius2), at<int32_t>(page_node), at<int32_t>(page_count), at<int32_t>(members));
             })
        .def("points",
             [](const Forest& self, int seq, int head, uintptr_t norm2, uintptr_t raw, uintptr_t level, uintptr_t parent) {
                 self.tree(seq, head).save_points(at<double>(norm2), at<float>(raw), at<uint8_t>(level), at<int32_t>(parent));
             })
        .def(
            "restore",
            [](Forest& self, int seq, int first, int points, int held, uintptr_t bases, int threads, uintptr_t radius2, uintptr_t pages,
               uintptr_t page_node, uintptr_t page_count, uintptr_t members) {
                self.restore(seq, first, points, held, at<const int64_t>(bases), at<const double>(radius2), at<const int32_t>(pages),
                             at<const int32_t>(page_node), at<const int32_t>(page_count), at<const int32_t>(members), threads);
            },
            kFree);
}
