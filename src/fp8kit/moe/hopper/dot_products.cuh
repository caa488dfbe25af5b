// Shared by gates_and_ups.cu and downs.cu, which compute the experts of a few tokens as dot products.
// Blocks belong to one token each; only L2 knows that tokens share weights.
//
//   macro           unit        meaning
//   ONE_TOKEN       0 or 1      there is one token
//   HIDDEN          features    of a token and its result
//   INNER           features    of the intermediate
//   PAIRS           pairs       of a token and an expert, at most 32
//   ROWS            rows        of a weight in a block
//   CLUSTER         blocks      of downs that share the work of quantizing
//   GATE_WARPS      warps       of a block of gates_and_ups
//   DOWN_WARPS      warps       of a block of downs
//   WARPS_OF_PAIR   warps       of downs that share a pair; DOWN_WARPS is a multiple; 1 if a warp has several pairs
//   WEIGHT_BLOCKS   0 or 1      weights have a scale for each 128x128
//   GIVEN_SCALE     0 or 1      the intermediate has a static scale
//   BIAS_KIND_13    dtype tag   of gates and ups
//   BIAS_KIND_2     dtype tag   of downs
//   KIND            dtype tag   of tokens and the result, read by encode.cuh
//
// VECTORS and SCALES are read by token.cuh, GELU and LIMITED by activation.cuh. Sums have a fixed order.

constexpr int SPAN = 128;  // along K of a step of dot products
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
    const int blocks = (k + SPAN - 1) / SPAN;
    return __ldcg(WEIGHT_BLOCKS ? of_expert + row / 128 * blocks + span : of_expert + row * row_stride);
  }
  template <int BIAS_KIND>
  __device__ float added(int expert, int row) const {
    if (!bias) return 0.0f;
    const long long at = (long long)expert * rows + row;
    if (BIAS_KIND == F32) return __ldcg((const float*)bias + at);
    return widen<BIAS_KIND>(__ldcg((const u16*)bias + at));
  }
};

// Two codes as fp16, which is exact. Hopper has no MMA of a warp that multiplies fp8.
template <bool UPPER>
__device__ __forceinline__ u32 halves(u32 codes) {
  u32 both;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(both) : "r"(UPPER ? codes >> 16 : codes));
  return both;
}

__device__ __forceinline__ uint4 halves(uint2 codes) {
  return make_uint4(halves<false>(codes.x), halves<true>(codes.x), halves<false>(codes.y), halves<true>(codes.y));
}

// Dot products of 8 rows with spans, added up in two chains of MMAs. The two halves of a span are neighbouring rows of
// A, and even and odd columns of B; products of one half with the other are not read. K is permuted alike in A and B: a
// lane reads 16 neighbouring codes of rows lane / 8 and lane / 8 + 4, and as many values of the vector, in fp16.
struct Dot {
  float sum[2][4] = {};

  __device__ __forceinline__ void add(const u8* rows, int pitch, bool inside, const uint4 (&x)[2]) {
    const int lane = threadIdx.x % 32;
    const u8* const first = rows + lane / 8 * pitch + lane % 8 * 16;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 low = inside ? *(const uint4*)first : zero, high = inside ? *(const uint4*)(first + 4 * pitch) : zero;
    multiply(sum[0], low.x, high.x, x[0].x, x[0].y);
    multiply(sum[1], low.y, high.y, x[0].z, x[0].w);
    multiply(sum[0], low.z, high.z, x[1].x, x[1].y);
    multiply(sum[1], low.w, high.w, x[1].z, x[1].w);
  }
  // Over half a span: of rows lane / 8 and lane / 8 + 4.
  __device__ __forceinline__ float2 of_half() const {
    const bool second = threadIdx.x & 4;
    return make_float2(second ? sum[0][1] + sum[1][1] : sum[0][0] + sum[1][0],
                       second ? sum[0][3] + sum[1][3] : sum[0][2] + sum[1][2]);
  }

 private:
  __device__ static __forceinline__ void multiply(float (&sum)[4], u32 low, u32 high, u32 x0, u32 x1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(halves<false>(low)), "r"(halves<false>(high)), "r"(halves<true>(low)), "r"(halves<true>(high)),
          "r"(x0), "r"(x1));
  }
};

// Adds both halves of a warp's dot products and writes the sum of each row.
__device__ __forceinline__ void put_rows(float2 total, float* sums) {
  total.x += __shfl_xor_sync(~0u, total.x, 4);
  total.y += __shfl_xor_sync(~0u, total.y, 4);
  if (threadIdx.x % 8 == 0) {
    sums[threadIdx.x % 32 / 8] = total.x;
    sums[threadIdx.x % 32 / 8 + 4] = total.y;
  }
}

// The sum of the lanes that differ in lane / 8 alone.
__device__ __forceinline__ float sum_of_quarters(float value) {
  value += __shfl_xor_sync(~0u, value, 8);
  return value + __shfl_xor_sync(~0u, value, 16);
}
