// The result of one token, from its activated gates and ups. A block computes 8 features for all pairs, then the 8
// that are gridDim.x * 8 further on. Its first weights arrive while the previous kernel ends. Each warp quantizes the
// groups that it multiplies. one_token.cuh lists the macros.

constexpr int INNER_SPANS = (INNER + SPAN - 1) / SPAN;
constexpr int ALL_SPANS = PAIRS * INNER_SPANS, SPANS_OF_WARP = (ALL_SPANS + DOWN_WARPS - 1) / DOWN_WARPS;
constexpr int AT_ONCE = SPANS_OF_WARP < 3 ? SPANS_OF_WARP : 3;  // spans that a warp quantizes together
static_assert(PAIRS <= 32, "a lane holds each");

// Quantizes the spans of the intermediate that a warp multiplies: those of number warp, warp + DOWN_WARPS, ...
__device__ __forceinline__ void quantize_spans(const float* h, const float* given_scale, float min_scale, u32 existing,
                                               u8* codes, float* scales) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int from = warp; from < ALL_SPANS; from += DOWN_WARPS * AT_ONCE) {
    float4 held[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int span = from + i * DOWN_WARPS, pair = span / INNER_SPANS, at = span % INNER_SPANS * SPAN + lane * 4;
      const bool read = span < ALL_SPANS && at < INNER && existing >> pair & 1;
      held[i] = read ? __ldcg((const float4*)(h + (long long)pair * INNER + at)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int span = from + i * DOWN_WARPS;
      if (span >= ALL_SPANS) continue;
      const float4 v = held[i];
      float scale;
      if (GIVEN_SCALE) {
        scale = *given_scale;
      } else {
        const u32 words[4] = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
        u32 magnitude = 0;
#pragma unroll
        for (const u32 word : words) magnitude = max(magnitude, word & 0x7fffffff);
        scale = scale_of<F32>(__reduce_max_sync(~0u, magnitude), min_scale);
      }
      const float reciprocal = __frcp_rn(scale);
      const u32 low = encode_pair(v.x, v.y, scale, scale, reciprocal, reciprocal);
      const u32 high = encode_pair(v.z, v.w, scale, scale, reciprocal, reciprocal);
      *(u32*)(codes + span * SPAN + lane * 4) = low | high << 16;
      if (lane == 0) scales[span] = scale;
    }
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32 * DOWN_WARPS, DOWN_WARPS > 8 ? 2 : 1) downs(
    const void* ids, int id_bytes, int experts, const float* router_weights, const float* h, const float* given_scale,
    float min_scale, const u8* codes, const float* scale, const void* bias, int rows, int expert_stride,
    int row_stride, u16* y) {
  constexpr int FACTORS = WEIGHT_BLOCKS ? INNER_SPANS : ROWS;  // of a pair
  extern __shared__ __align__(128) u8 weights[];  // rows of all pairs; then the pairs' codes, scales and factors
  u8* const quantized = weights + PAIRS * ROWS * INNER;
  float* const scales = (float*)(quantized + ALL_SPANS * SPAN);
  float* const factors = scales + ALL_SPANS;
  __shared__ float sums[DOWN_WARPS][ROWS];
  __shared__ u64 arrived;
  const Weights w = {codes, scale, bias, rows, INNER, expert_stride, row_stride};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // each lane holds a pair
  const int of_lane = lane < PAIRS ? Routes{ids, id_bytes, PAIRS, experts}.expert(lane) : -1;
  const float weight_of_lane = lane < PAIRS ? __ldcg(router_weights + lane) : 0.0f;
  const u32 existing = __ballot_sync(~0u, of_lane >= 0);
  const auto load_weights = [&](int row) {
    if (lane == 0) barrier_expect(shared(&arrived), __popc(existing) * ROWS * INNER);
    __syncwarp();
    if (of_lane >= 0) bulk_load(weights + lane * ROWS * INNER, w.row_of(of_lane, row), ROWS * INNER, shared(&arrived));
  };
  // a thread loads one factor, and stores it when the previous factors have been read
  static_assert(PAIRS * FACTORS <= 32 * DOWN_WARPS, "a factor for each thread");
  const auto factor_of_thread = [&](int row) {
    const int i = threadIdx.x, at = i % FACTORS, expert = __shfl_sync(~0u, of_lane, min(i / FACTORS, 31));
    return expert >= 0 ? w.factor(expert, row + (WEIGHT_BLOCKS ? 0 : at), WEIGHT_BLOCKS ? at : 0) : 0.0f;
  };
  const auto biases = [&](int row) {
    float sum = 0;
    for (int pair = 0; pair < PAIRS && bias; pair++) {
      const int expert = __shfl_sync(~0u, of_lane, pair);
      const float weight = __shfl_sync(~0u, weight_of_lane, pair);
      if (expert >= 0 && lane < ROWS) sum += weight * w.added<BIAS_KIND_2>(expert, row + lane);
    }
    return sum;
  };
  int row = blockIdx.x * ROWS;
  if (warp == 0) {
    if (lane == 0) {
      barrier_init(shared(&arrived), 1);
      barrier_init_fence();
    }
    load_weights(row);
  }
  float factor = factor_of_thread(row), added = warp == 0 ? biases(row) : 0.0f;
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  quantize_spans(h, given_scale, min_scale, existing, quantized, scales);
  for (u32 parity = 0;; parity ^= 1) {
    if (threadIdx.x < PAIRS * FACTORS) factors[threadIdx.x] = factor;
    __syncthreads();
    barrier_wait(shared(&arrived), parity);
    float2 total = {0, 0};
#pragma unroll AT_ONCE
    for (int span = warp; span < ALL_SPANS; span += DOWN_WARPS) {
      const int pair = span / INNER_SPANS, of_pair = span % INNER_SPANS, at = of_pair * SPAN;
      const float by = scales[span] * __shfl_sync(~0u, weight_of_lane, pair);
      if (!(existing >> pair & 1)) continue;
      const bool inside = at + lane % 8 * 16 < INNER;
      const float2 sum = dot(weights + pair * ROWS * INNER + at, INNER, inside, quantized + span * SPAN);
      const float* const of_rows = factors + pair * FACTORS;
      total.x += sum.x * by * of_rows[WEIGHT_BLOCKS ? of_pair : lane / 8];
      total.y += sum.y * by * of_rows[WEIGHT_BLOCKS ? of_pair : lane / 8 + 4];
    }
    put_rows(total, sums[warp]);
    __syncthreads();
    const int next = row + gridDim.x * ROWS;
    const bool more = next < HIDDEN;
    if (more) {
      if (warp == 0) load_weights(next);
      factor = factor_of_thread(next);
    }
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < DOWN_WARPS; i++) added += sums[i][lane % ROWS];
      if (lane < ROWS) y[row + lane] = (u16)narrow(added, 0.0f);
      if (more) added = biases(next);
    }
    if (!more) return;
    row = next;
  }
}
