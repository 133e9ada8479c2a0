#define KV_NAME kernels_avx512_vnni
#define KV_ISA avx512_vnni
#define KV_WIDTH 16
#define KV_GROUP 12
#define KV_CODED true
#include "kernels.inl"
