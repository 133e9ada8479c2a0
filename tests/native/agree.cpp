// Holds the kernels of every instruction set of the machine to the scalar ones, and prints what each chooses from trees of numbers whose
// products are exact: test_cross.py runs it for other machines.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "forest.h"
#include "kernels.h"

using namespace kvthaw;

namespace {

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<uint32_t>(state >> 33);
    }
    float sixteenths() { return (static_cast<int>(next() % 127) - 63) / 16.0f; }
    float fine() { return static_cast<int>(next() % 200001 - 100000) / 30000.0f; }
};

const char* isa_name = "";

void demand(bool ok, const char* what, int dim, int dtype) {
    if (ok) return;
    std::printf("%s: %s differ from the scalar ones at dim %d, dtype %d\n", isa_name, what, dim, dtype);
    std::exit(1);
}

void store(float x, Dtype dtype, char* at) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const double wide = x;
    const uint16_t bf16 = bits >> 16;  // exact for sixteenths
    const uint32_t size = bits & 0x7fffffff;
    const uint16_t f16 = (bits >> 16 & 0x8000) | (size == 0 ? 0 : (size >> 13) - (112 << 10));
    const int8_t i8 = static_cast<int8_t>(x * 16);
    if (dtype == Dtype::f32) std::memcpy(at, &x, 4);
    if (dtype == Dtype::f64) std::memcpy(at, &wide, 8);
    if (dtype == Dtype::bf16) std::memcpy(at, &bf16, 2);
    if (dtype == Dtype::f16) std::memcpy(at, &f16, 2);
    if (dtype == Dtype::i8 || dtype == Dtype::f8) std::memcpy(at, &i8, 1);
}

void compare(const Kernels& plain, const Kernels& own) {
    Random random{1};
    for (int dim : {1, 3, 4, 7, 8, 16, 33, 64, 80, 96, 128, 256}) {
        std::vector<float> query(dim), exact(dim), mine(dim), theirs(dim);
        for (float& x : query) x = random.fine();
        for (float& x : exact) x = random.sixteenths();
        for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i8, Dtype::f64, Dtype::f8}) {
            const int code = static_cast<int>(dtype), count = 37;
            const size_t stride = kScales + std::max(size_of(dtype) * dim, coded_bytes(dim));
            std::vector<char> rows(count * stride + 8);
            std::vector<const void*> at(count);
            const float scale = 0.75f;
            for (int r = 0; r < count; ++r) {
                char* row = rows.data() + r * stride + kScales;
                std::memcpy(row - kScales, &scale, 4);
                for (int i = 0; i < dim; ++i) store(random.sixteenths(), dtype, row + i * size_of(dtype));
                if (dtype == Dtype::i8) std::memcpy(row + coded_bytes(dim) - 4, &scale, 4);
                at[r] = row;
            }
            std::vector<float> one(count), other(count), alone(count);
            if (dtype == Dtype::i8) {
                std::vector<RowBlock> blocks;  // the first query wants every row, the others every second, third and fourth
                for (int r = 0; r < count; ++r)
                    blocks.push_back({static_cast<const char*>(at[r]), 1, 1u + 2 * (r % 2 == 0) + 4 * (r % 3 == 0) + 8 * (r % 4 == 0)});
                const std::vector<const float*> asked(kTogether, query.data());
                std::vector<float> more(3 * count);
                const auto multiply = [&](const Kernels& kernels, std::vector<float>& all) {
                    const std::vector<float*> to{all.data(), &more[0], &more[count], &more[2 * count]};
                    kernels.dots_together(asked.data(), kTogether, blocks.data(), count, dim, to.data());
                };
                multiply(plain, one);
                multiply(own, other);
                demand(one == other, "products of whole numbers", dim, code);
                for (int r = 0; r < count; r += 12)
                    demand(more[r / 2] == one[r] && more[count + r / 3] == one[r] && more[2 * count + r / 4] == one[r],
                           "products with several queries", dim, code);
            } else {
                plain.dots(exact.data(), at.data(), count, dim, dtype, one.data());
                own.dots(exact.data(), at.data(), count, dim, dtype, other.data());
                demand(dtype == Dtype::f8 || one == other, "exact products", dim, code);
                plain.dots(query.data(), at.data(), count, dim, dtype, one.data());
                own.dots(query.data(), at.data(), count, dim, dtype, other.data());
                for (int r = 0; r < count; ++r) {
                    own.dots(query.data(), &at[r], 1, dim, dtype, &alone[r]);
                    demand(std::fabs(one[r] - other[r]) <= 1e-5f * std::fabs(one[r]) + 2e-4f * dim, "products", dim, code);
                }
                demand(alone == other, "products of a row alone", dim, code);
            }
            if (dtype == Dtype::f32) {
                std::vector<float> panel(40 * dim), together(7 * 40);
                for (int r = 0; r < count; ++r) std::memcpy(&panel[static_cast<size_t>(r) * dim], at[r], 4 * dim);
                const std::vector<const float*> keys(7, query.data());
                own.products(keys.data(), 7, panel.data(), 40, dim, together.data());
                for (int k = 0; k < 7; ++k)
                    demand(std::equal(alone.begin(), alone.end(), together.begin() + 40 * k), "products side by side", dim, code);
            }
            std::vector<double> sum(dim), total(dim);
            for (int r = 0; r < count; ++r) {
                if (dtype != Dtype::i8) {
                    plain.widen(at[r], dim, dtype, mine.data());
                    own.widen(at[r], dim, dtype, theirs.data());
                    demand(std::memcmp(mine.data(), theirs.data(), 4 * dim) == 0, "rows as float32", dim, code);
                }
                plain.add(at[r], dim, dtype, 0.3 * r, sum.data());
                own.add(at[r], dim, dtype, 0.3 * r, total.data());
            }
            demand(sum == total, "sums", dim, code);
        }
        std::vector<char> digest(coded_bytes(dim)), codes(coded_bytes(dim));
        plain.encode(query.data(), dim, digest.data());
        own.encode(query.data(), dim, codes.data());
        demand(digest == codes, "digests", dim, 0);
        double norm = 0, square = 0;
        std::vector<float> raw(1), measured(1);
        plain.measure(exact.data(), dim, query.data(), 1, dim, &norm, raw.data());
        own.measure(exact.data(), dim, query.data(), 1, dim, &square, measured.data());
        demand(norm == square && std::fabs(raw[0] - measured[0]) < 1e-5f * dim, "norms", dim, 0);
        const float all = plain.log_sum_exp(query.data(), dim, 0.7f), sums = own.log_sum_exp(query.data(), dim, 0.7f);
        demand(std::fabs(all - sums) < 2e-6f * (1 + std::fabs(all)), "logarithms", dim, 0);
    }
    uint16_t half[8] = {};
    float wide[8], found[8];
    for (int bits = 0; bits < 65536; ++bits) {
        for (uint16_t& each : half) each = static_cast<uint16_t>(bits);
        plain.widen(half, 8, Dtype::f16, wide);
        own.widen(half, 8, Dtype::f16, found);
        demand(wide[5] == found[5] || (wide[5] != wide[5] && found[5] != found[5]), "halves", 8, bits);
    }
}

// Of keys the parents with the largest products, by each table's own panels.
std::vector<int32_t> nearest(const Kernels& kernels, const std::vector<float>& keys, const std::vector<float>& parents, int depth) {
    const int count = static_cast<int>(keys.size()) / depth, of = static_cast<int>(parents.size()) / depth, width = kernels.panel;
    std::vector<float> panels((of + width - 1) / width * width * depth);
    for (int p = 0; p * width < of; ++p)
        for (int d = 0; d < depth; ++d)
            for (int j = 0; j < width; ++j)
                panels[(p * depth + d) * width + j] = parents[std::min(of - 1, p * width + j) * depth + d];
    std::vector<int32_t> which(count);
    kernels.nearest(keys.data(), count, panels.data(), of, depth, which.data());
    return which;
}

uint64_t hash = 1469598103934665603ull;

void mix(const std::vector<int32_t>& values) {
    for (const int32_t value : values) hash = (hash ^ static_cast<uint32_t>(value)) * 1099511628211ull;
}

void choose(const Kernels& kernels) {
    Random random{7};
    const int depth = 20;
    std::vector<float> keys(kNearestKeys / 2 * depth), parents(151 * depth);
    for (float& x : keys) x = random.sixteenths();
    for (float& x : parents) x = random.sixteenths();
    mix(nearest(kernels, keys, parents, depth));
    const int dim = 48, heads = 2, group = 2, points = 700, budget = 96, block = 1024;
    for (Dtype dtype : {Dtype::f32, Dtype::f16})
        for (Descend descend : {Descend::node, Descend::level, Descend::digest}) {
            const Effort query{20, 0.8, 1}, insert{20, 0.6, 1};
            Settings settings{dim, 3, 16, 1, 4, 0.2, 0.3, false, 5, query, insert, insert, 0.0, Unit::token, Merge::take_turns, descend,
                              descend == Descend::digest ? 2 : 0, 2.0f, 0.125f, dtype, &kernels, {}, 0};
            settings.directions.resize(heads * settings.indices() * (dim + 1));
            for (float& x : settings.directions) x = random.sixteenths();
            const size_t row = 2 * dim * size_of(dtype);
            std::vector<char> stored(heads * block * row);
            for (int h = 0; h < heads; ++h)
                for (int t = 0; t < points; ++t)
                    for (int i = 0; i < 2 * dim; ++i)
                        store(random.sixteenths(), dtype, stored.data() + (h * block + t) * row + i * size_of(dtype));
            const int64_t base = reinterpret_cast<int64_t>(stored.data());
            Forest forest(std::move(settings), 1, heads, block);
            forest.build(0, 4, points - 104, &base, 2);
            forest.append({0}, 100, &base, 1, 1);
            std::vector<float> asked(heads * group * dim);
            for (float& x : asked) x = random.sixteenths();
            std::vector<int32_t> rows(heads * budget), counts(heads);
            forest.select(1, group, asked.data(), budget, &base, 1, rows.data(), counts.data(), 1);
            mix(rows);
            mix(counts);
        }
}

}  // namespace

int main() {
    const char* names[] = {"scalar", "avx2", "avx512", "neon"};
    for (int code = 0; code < 4; ++code)
        if (const Kernels* kernels = find_kernels(static_cast<Isa>(code))) {
            isa_name = names[code];
            compare(*find_kernels(Isa::scalar), *kernels);
            hash = 1469598103934665603ull;
            choose(*kernels);
            std::printf("%s %016llx\n", isa_name, static_cast<unsigned long long>(hash));
        }
}
