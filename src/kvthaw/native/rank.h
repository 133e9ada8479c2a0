// Ranking by one integer: a score and who has it.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvthaw {

// Ascending keys are descending scores, and of equal scores ascending ids.
inline uint64_t rank_key(float score, int32_t id) {
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits ^= bits & 0x80000000u ? 0xffffffffu : 0x80000000u;
    return static_cast<uint64_t>(~bits) << 32 | static_cast<uint32_t>(id);
}

inline int32_t id_of(uint64_t key) { return static_cast<int32_t>(static_cast<uint32_t>(key)); }

inline float score_of(uint64_t key) {
    uint32_t bits = ~static_cast<uint32_t>(key >> 32);
    bits ^= bits & 0x80000000u ? 0x80000000u : 0xffffffffu;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

}  // namespace kvthaw
