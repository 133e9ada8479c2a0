#define KV_NAME kernels_avx2
#define KV_ISA avx2
#define KV_WIDTH 8
#define KV_GROUP 6
#include "kernels.inl"
