// XXH64 (Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), seed 0: 10 GB/s a core. It finds damage, not forgery.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

namespace kvthaw {

class Checksum {
   public:
    void update(const uint8_t* data, size_t size) {
        total_ += size;
        if (held_ > 0) {
            const size_t taken = size < kStripe - held_ ? size : kStripe - held_;
            std::memcpy(rest_ + held_, data, taken);
            held_ += taken, data += taken, size -= taken;
            if (held_ < kStripe) return;
            stripe(rest_);
            held_ = 0;
        }
        for (; size >= kStripe; data += kStripe, size -= kStripe) stripe(data);
        if (size > 0) std::memcpy(rest_, data, size);
        held_ = size;
    }

    // Reads a file into parts of memory, one after the other, and adds them. Returns the bytes read, fewer if the file ends before,
    // and the system's error, 0 without one.
    // parts: [count, 2], addresses and bytes.
    std::pair<size_t, int> read(int file, const int64_t* parts, size_t count) {
        size_t done = 0;
        for (size_t part = 0; part < count; ++part) {
            uint8_t* const data = reinterpret_cast<uint8_t*>(parts[2 * part]);
            const auto size = static_cast<size_t>(parts[2 * part + 1]);
            for (size_t at = 0; at < size;) {
                const size_t most = size - at < kPiece ? size - at : kPiece;  // added while the core's cache holds it
                const ssize_t found = ::read(file, data + at, most);
                if (found < 0 && errno == EINTR) continue;
                if (found < 0) return {done, errno};
                if (found == 0) return {done, 0};
                update(data + at, static_cast<size_t>(found));
                at += static_cast<size_t>(found), done += static_cast<size_t>(found);
            }
        }
        return {done, 0};
    }

    uint64_t digest() const {
        uint64_t sum = kFifth;
        if (total_ >= kStripe) {
            sum = rotated(lanes_[0], 1) + rotated(lanes_[1], 7) + rotated(lanes_[2], 12) + rotated(lanes_[3], 18);
            for (const uint64_t lane : lanes_) sum = (sum ^ round(0, lane)) * kFirst + kFourth;
        }
        sum += total_;
        const uint8_t *at = rest_, *end = rest_ + held_;
        for (; end - at >= 8; at += 8) sum = rotated(sum ^ round(0, load<uint64_t>(at)), 27) * kFirst + kFourth;
        if (end - at >= 4) sum = rotated(sum ^ (load<uint32_t>(at) * kFirst), 23) * kSecond + kThird, at += 4;
        for (; at < end; ++at) sum = rotated(sum ^ (*at * kFifth), 11) * kFirst;
        sum = (sum ^ (sum >> 33)) * kSecond;
        sum = (sum ^ (sum >> 29)) * kThird;
        return sum ^ (sum >> 32);
    }

   private:
    static constexpr size_t kStripe = 32, kPiece = 1 << 20;
    static constexpr uint64_t kFirst = 0x9E3779B185EBCA87, kSecond = 0xC2B2AE3D27D4EB4F, kThird = 0x165667B19E3779F9,
                              kFourth = 0x85EBCA77C2B2AE63, kFifth = 0x27D4EB2F165667C5;

    template <class T>
    static uint64_t load(const uint8_t* from) {  // little-endian, as on every machine that this is built for
        T word;
        std::memcpy(&word, from, sizeof word);
        return word;
    }
    static uint64_t rotated(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }
    static uint64_t round(uint64_t lane, uint64_t word) { return rotated(lane + word * kSecond, 31) * kFirst; }
    void stripe(const uint8_t* data) {
        for (int i = 0; i < 4; ++i) lanes_[i] = round(lanes_[i], load<uint64_t>(data + 8 * i));
    }

    uint64_t lanes_[4] = {kFirst + kSecond, kSecond, 0, 0 - kFirst};
    uint8_t rest_[kStripe] = {};
    size_t held_ = 0;
    uint64_t total_ = 0;
};

}  // namespace kvthaw
