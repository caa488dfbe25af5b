// Shared by gates_and_ups.cu and downs.cu, which compute the experts of one token as dot products.
//
//   macro           unit        meaning
//   HIDDEN          features    of the token and the result
//   INNER           features    of the intermediate
//   PAIRS           pairs       of the token and an expert, at most 32
//   ROWS            rows        of a weight in a block
//   GATE_WARPS      warps       of a block of gates_and_ups
//   DOWN_WARPS      warps       of a block of downs
//   WEIGHT_BLOCKS   0 or 1      weights have a scale for each 128x128
//   GIVEN_SCALE     0 or 1      the intermediate has a static scale
//   BIAS_KIND_13    dtype tag   of gates and ups
//   BIAS_KIND_2     dtype tag   of downs
//   KIND            dtype tag   of the token and the result, read by encode.cuh
//
// VECTORS and SCALES are read by token.cuh, GELU and LIMITED by activation.cuh. Sums have a fixed order.

constexpr int SPAN = 128;  // along K of a dot product of two MMAs
static_assert(ROWS == 8, "weight rows of these");

// One of the two weights of all experts. Scales and biases are read from L2, see routes.cuh.
struct Weights {
  const u8* codes;  // [experts, rows, k]
  const float* scale;
  const void* bias;  // [experts, rows] or null
  int rows, k, expert_stride, row_stride;

  __device__ const u8* row_of(int expert, int row) const { return codes + ((long long)expert * rows + row) * k; }
  // The factor of a row in a span.
  __device__ float factor(int expert, int row, int span) const {
    const float* const of_expert = scale + (long long)expert * expert_stride;
    return __ldcg(WEIGHT_BLOCKS ? of_expert + row / 128 * ((k + SPAN - 1) / SPAN) + span : of_expert + row * row_stride);
  }
  template <int BIAS_KIND>
  __device__ float added(int expert, int row) const {
    if (!bias) return 0.0f;
    const long long at = (long long)expert * rows + row;
    if (BIAS_KIND == F32) return __ldcg((const float*)bias + at);
    return widen<BIAS_KIND>(__ldcg((const u16*)bias + at));
  }
};

// A lane's dot products over half a span: those of rows lane / 8 and lane / 8 + 4. The two halves of a span are
// neighbouring rows of A, and even and odd columns of B; products of one half with the other are not read. K is
// permuted alike in A and B.
__device__ __forceinline__ float2 dot(const u8* rows, int pitch, bool inside, const u8* codes) {
  const int lane = threadIdx.x % 32, at = lane % 8 * 16;
  const uint4 zero = make_uint4(0, 0, 0, 0), x = inside ? *(const uint4*)(codes + at) : zero;
  const uint4 low = inside ? *(const uint4*)(rows + lane / 8 * pitch + at) : zero;
  const uint4 high = inside ? *(const uint4*)(rows + (lane / 8 + 4) * pitch + at) : zero;
  float sum[4] = {};
  const auto mma = [&](u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  };
  mma(low.x, high.x, low.y, high.y, x.x, x.y);
  mma(low.z, high.z, low.w, high.w, x.z, x.w);
  return lane & 4 ? make_float2(sum[1], sum[3]) : make_float2(sum[0], sum[2]);
}

// Adds both halves of a warp's dot products and writes the sum of each row.
__device__ __forceinline__ void put_rows(float2 total, float* sums) {
  total.x += __shfl_xor_sync(~0u, total.x, 4);
  total.y += __shfl_xor_sync(~0u, total.y, 4);
  if (threadIdx.x % 8 == 0) {
    sums[threadIdx.x % 32 / 8] = total.x;
    sums[threadIdx.x % 32 / 8 + 4] = total.y;
  }
}
