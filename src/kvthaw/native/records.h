// Records of one size by number, in as few pieces of memory as grow with them: growing moves none, so that no append waits for a copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvthaw {

class Records {
public:
    explicit Records(size_t bytes) : bytes_(bytes) {}
    Records(const Records& other) : bytes_(other.bytes_) {
        resize(other.size_);
        for (size_t begin = 0; begin < size_;) {
            const size_t count = std::min(end_of(pieces_, begin), end_of(other.pieces_, begin)) - begin;
            std::memcpy(at(begin), other.at(begin), count * bytes_);
            begin += count;
        }
    }
    Records& operator=(const Records& other) {
        Records copy(other);
        return *this = std::move(copy);
    }
    Records(Records&&) = default;
    Records& operator=(Records&&) = default;

    size_t size() const { return size_; }
    char* at(size_t number) const {
        const Piece* piece = &pieces_.back();
        while (number < piece->begin) --piece;  // nearly always the last, or one of few
        return piece->data.get() + (number - piece->begin) * bytes_;
    }
    void resize(size_t size) {
        if (const size_t have = room(); size > have) reserve(std::max(size, have + have / 8 + 16));
        size_ = size;
    }
    void reserve(size_t size) {
        if (const size_t have = room(); size > have) pieces_.push_back({have, size, allocate((size - have) * bytes_)});
    }
    size_t nbytes() const { return room() * bytes_; }

private:
    struct Free {
        void operator()(char* data) const { std::free(data); }
    };
    struct Piece {
        size_t begin, end;
        std::unique_ptr<char[], Free> data;
    };
    size_t room() const { return pieces_.empty() ? 0 : pieces_.back().end; }
    static size_t end_of(const std::vector<Piece>& pieces, size_t number) {
        return std::find_if(pieces.begin(), pieces.end(), [&](const Piece& piece) { return number < piece.end; })->end;
    }
    // From a line of memory on; what is large in huge pages where the system has them, since records are read anywhere.
    static std::unique_ptr<char[], Free> allocate(size_t bytes) {
        constexpr size_t kLine = 64, kHuge = size_t{1} << 21;
        const size_t align = bytes >= kHuge ? kHuge : kLine;
        char* data = static_cast<char*>(std::aligned_alloc(align, (bytes + align - 1) / align * align));
        if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
        if (align == kHuge) madvise(data, bytes, MADV_HUGEPAGE);
#endif
        return std::unique_ptr<char[], Free>(data);
    }

    size_t bytes_, size_ = 0;
    std::vector<Piece> pieces_;
};

}  // namespace kvthaw
