// The result of a few tokens, from their activated gates and ups. A block computes 8 features of a token, then the 8
// that are `stride` further on, behind those of its token's other blocks. Its first weights arrive while the previous
// kernel ends. The two warps of a cluster that multiply the same groups quantize half of them each. dot_products.cuh
// lists the macros.

constexpr int INNER_SPANS = (INNER + SPAN - 1) / SPAN;
constexpr int PAIRS_AT_ONCE = DOWN_WARPS / WARPS_OF_PAIR, PAIRS_OF_WARP = (PAIRS + PAIRS_AT_ONCE - 1) / PAIRS_AT_ONCE;
constexpr int SPANS_OF_PAIR = (INNER_SPANS + WARPS_OF_PAIR - 1) / WARPS_OF_PAIR;  // of a warp
constexpr int PARTS = PAIRS_OF_WARP * SPANS_OF_PAIR;                             // of a warp
constexpr int ALL_SPANS = PAIRS * INNER_SPANS;
static_assert(CLUSTER == 2, "one half of the parts each");
static_assert(PAIRS <= 32 && PARTS <= 32, "a lane holds each");
static_assert(PAIRS_OF_WARP == 1 || WARPS_OF_PAIR == 1, "the parts that are there come first");

// The pairs of the token; each lane of a warp holds one.
struct HeldPairs {
  int lane, expert;  // -1 for none
  float weight;
  u32 existing;  // a bit for each pair that has an expert

  __device__ __forceinline__ HeldPairs(const Routes& routes, const float* router_weights, int token) {
    lane = threadIdx.x % 32;
    expert = lane < PAIRS ? routes.expert(token * PAIRS + lane) : -1;
    weight = lane < PAIRS ? __ldcg(router_weights + token * PAIRS + lane) : 0.0f;
    existing = __ballot_sync(~0u, expert >= 0);
  }
};

// A span of a pair, one of those that a warp multiplies. The warps of the same number in a cluster have the same parts.
struct Part {
  int pair, span, of_all;
  bool there;

  __device__ __forceinline__ Part(int i) {
    const int warp = threadIdx.x / 32, turn = PAIRS_OF_WARP == 1 ? 0 : i / SPANS_OF_PAIR;
    pair = warp / WARPS_OF_PAIR + turn * PAIRS_AT_ONCE;
    span = warp % WARPS_OF_PAIR + (i - turn * SPANS_OF_PAIR) * WARPS_OF_PAIR;
    of_all = pair * INNER_SPANS + span;
    there = i < PARTS && (PAIRS % PAIRS_AT_ONCE == 0 || pair < PAIRS) &&
            (INNER_SPANS % WARPS_OF_PAIR == 0 || span < INNER_SPANS);
  }
};

// Quantizes the parts of a warp: writes codes, and scales times the router's weight. The two warps of the cluster that
// have the same parts share the work, and send each other the results; their barriers `received` count the bytes.
__device__ __forceinline__ void quantize_parts(const float* h, const float* given_scale, float min_scale,
                                               const HeldPairs& pairs, u8* codes, u64* received) {
  constexpr int OWN = (PARTS + 1) / 2, AT_ONCE = OWN < 3 ? OWN : 3;
  const int lane = threadIdx.x % 32, rank = cluster_rank();
  float* const scales = (float*)(codes + ALL_SPANS * SPAN);
  const u32 codes_of_peer = in_block(shared(codes), rank ^ 1), peer = in_block(shared(received), rank ^ 1);
#pragma unroll
  for (int from = 0; from < OWN; from += AT_ONCE) {
    float4 held[AT_ONCE];
    u32 magnitude_of_lane = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const Part part((from + i) * 2 + rank);
      const int at = part.span * SPAN + lane * 4;
      const bool read = part.there && (INNER % SPAN == 0 || at < INNER) && pairs.existing >> part.pair & 1;
      held[i] = read ? __ldcg((const float4*)(h + part.pair * INNER + at)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE && !GIVEN_SCALE; i++) {
      const float4 v = held[i];
      const u32 words[4] = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
      u32 magnitude = 0;
#pragma unroll
      for (const u32 word : words) magnitude = max(magnitude, word & 0x7fffffff);
      magnitude = __reduce_max_sync(~0u, magnitude);
      if (i == 0 || lane == i) magnitude_of_lane = magnitude;
    }
    // lane i has the scale of part from + i
    const float scale_of_lane = GIVEN_SCALE ? *given_scale : scale_of<F32>(magnitude_of_lane, min_scale);
    const float reciprocal_of_lane = __frcp_rn(scale_of_lane);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const Part part((from + i) * 2 + rank);
      if (!part.there) break;
      const float4 v = held[i];
      const float scale = __shfl_sync(~0u, scale_of_lane, i), reciprocal = __shfl_sync(~0u, reciprocal_of_lane, i);
      const float by = scale * __shfl_sync(~0u, pairs.weight, part.pair);
      const u32 low = encode_pair(v.x, v.y, scale, scale, reciprocal, reciprocal);
      const u32 high = encode_pair(v.z, v.w, scale, scale, reciprocal, reciprocal);
      const int at = part.of_all * SPAN + lane * 4;
      *(u32*)(codes + at) = low | high << 16;
      send(codes_of_peer + at, low | high << 16, peer);
      if (lane > 0) continue;
      scales[part.of_all] = by;
      send(codes_of_peer + ALL_SPANS * SPAN + part.of_all * 4, __float_as_uint(by), peer);
    }
  }
  __syncwarp();
  barrier_wait_cluster(shared(received), 0);
}

// The bytes that a warp gets from the other block of the cluster.
__device__ __forceinline__ int sent_bytes() {
  int parts = 0;
#pragma unroll
  for (int i = cluster_rank() ^ 1; i < PARTS; i += 2) parts += Part(i).there;
  return parts * (SPAN + 4);
}

// A warp starts to copy 8 rows of each pair.
__device__ __forceinline__ void load_rows(u8* to, const Weights& w, const HeldPairs& pairs, int row, u64* arrived) {
  constexpr int BYTES = ROWS * INNER;
  const int lane = pairs.lane;
  if (lane == 0) barrier_expect(shared(arrived), __popc(pairs.existing) * BYTES);
  __syncwarp();
  if (pairs.expert >= 0) bulk_load(to + lane * BYTES, w.row_of(pairs.expert, row), BYTES, shared(arrived));
}

// The factors of 8 rows. Of blocks, lane i has that of part i. Of rows, a lane has those of rows lane / 8 and
// lane / 8 + 4, for each pair of the warp.
struct Factors {
  float2 of[WEIGHT_BLOCKS ? 1 : PAIRS_OF_WARP];

  __device__ __forceinline__ float of_part(int i) const { return WEIGHT_BLOCKS ? __shfl_sync(~0u, of[0].x, i) : 1.0f; }
  __device__ __forceinline__ float2 of_rows(int p) const { return WEIGHT_BLOCKS ? make_float2(1, 1) : of[p]; }
};

__device__ __forceinline__ Factors factors_of(const Weights& w, const HeldPairs& pairs, int row) {
  const int lane = pairs.lane, at = WEIGHT_BLOCKS ? row : row + lane / 8;
  Factors found;
#pragma unroll
  for (int p = 0; p < (WEIGHT_BLOCKS ? 1 : PAIRS_OF_WARP); p++) {
    const Part part(WEIGHT_BLOCKS ? lane : p * SPANS_OF_PAIR);
    const int expert = __shfl_sync(~0u, pairs.expert, part.pair % 32);
    const bool there = part.there && expert >= 0;
    found.of[p].x = there ? w.factor(expert, at, part.span) : 0.0f;
    if (!WEIGHT_BLOCKS) found.of[p].y = there ? w.factor(expert, at + 4, 0) : 0.0f;
  }
  return found;
}

// The sum of all pairs' biases, times the router's weights, of row `row + lane % 8`.
__device__ __forceinline__ float biases(const Weights& w, const HeldPairs& pairs, int row) {
  float sum = 0;
  if (!w.bias) return sum;
  const int lane = pairs.lane;
#pragma unroll
  for (int i = 0; i < PAIRS; i += 4) {
    const int pair = i + lane / 8, expert = __shfl_sync(~0u, pairs.expert, pair);
    const float weight = __shfl_sync(~0u, pairs.weight, pair);
    if (pair < PAIRS && expert >= 0) sum += weight * w.added<BIAS_KIND_2>(expert, row + lane % 8);
  }
  return sum_of_quarters(sum);
}

// What a warp adds to 8 features: of rows lane / 8 and lane / 8 + 4, over half of each span.
__device__ __forceinline__ float2 multiply_parts(const u8* weights, const u8* quantized, const Factors& factors,
                                                 const HeldPairs& pairs) {
  const int lane = pairs.lane;
  const float* const scales = (const float*)(quantized + ALL_SPANS * SPAN);
  float2 total = {0, 0};
#pragma unroll
  for (int p = 0; p < PAIRS_OF_WARP; p++) {
    const int pair = Part(p * SPANS_OF_PAIR).pair;
    if (pair >= PAIRS || !(pairs.existing >> pair & 1)) continue;
    float2 of_pair = {0, 0};
#pragma unroll
    for (int i = p * SPANS_OF_PAIR; i < (p + 1) * SPANS_OF_PAIR; i++) {
      const Part part(i);
      if (!part.there) break;
      const int at = part.span * SPAN;
      const bool inside = INNER % SPAN == 0 || at + lane % 8 * 16 < INNER;
      const uint4 x = *(const uint4*)(quantized + part.of_all * SPAN + lane % 8 * 16);
      const float by = scales[part.of_all] * factors.of_part(i);
      Dot dot;
      dot.add(weights + pair * ROWS * INNER + at, INNER, inside, {halves({x.x, x.y}), halves({x.z, x.w})});
      const float2 sum = dot.of_half();
      of_pair = {of_pair.x + sum.x * by, of_pair.y + sum.y * by};
    }
    const float2 by_rows = factors.of_rows(p);
    total = {total.x + of_pair.x * by_rows.x, total.y + of_pair.y * by_rows.y};
  }
  return total;
}

extern "C" __global__ void __launch_bounds__(32 * DOWN_WARPS, 32 / DOWN_WARPS) downs(
    const void* ids, int id_bytes, int experts, int tokens, int stride, const float* router_weights, const float* h,
    const float* given_scale, float min_scale, const u8* codes, const float* scale, const void* bias, int rows,
    int expert_stride, int row_stride, u16* y) {
  extern __shared__ __align__(128) u8 weights[];  // rows of all pairs; then the pairs' codes and scales
  u8* const quantized = weights + PAIRS * ROWS * INNER;
  __shared__ float sums[2][DOWN_WARPS][ROWS];
  __shared__ volatile int token_of_block;  // a register too many, if it stayed in one
  __shared__ u64 arrived, received[DOWN_WARPS];
  const Weights w = {codes, scale, bias, rows, INNER, expert_stride, row_stride};
  const int cluster = blockIdx.x / CLUSTER, token = ONE_TOKEN ? 0 : cluster % tokens;
  const HeldPairs pairs({ids, id_bytes, PAIRS, experts}, router_weights, token);
  const int warp = threadIdx.x / 32, lane = pairs.lane;
  int row = ((ONE_TOKEN ? cluster : cluster / tokens) * CLUSTER + cluster_rank()) * ROWS;
  if (lane == 0) {
    barrier_init(shared(received + warp), 1);
    barrier_init_fence();
    barrier_expect(shared(received + warp), sent_bytes());
  }
  if (warp == 0) {
    if (lane == 0) {
      token_of_block = token;
      barrier_init(shared(&arrived), 1);
      barrier_init_fence();
    }
    load_rows(weights, w, pairs, row, &arrived);
  }
  Factors factors = factors_of(w, pairs, row);
  float added = warp == 0 ? biases(w, pairs, row) : 0.0f;
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // both blocks run, and have their barriers
  quantize_parts(h + (long long)token * PAIRS * INNER, given_scale, min_scale, pairs, quantized, received + warp);
  for (u32 parity = 0;; parity ^= 1) {
    const int next = row + stride;
    const bool more = next < HIDDEN;
    const Factors of_next = more ? factors_of(w, pairs, next) : factors;
    const float added_next = more && warp == 0 ? biases(w, pairs, next) : 0.0f;
    barrier_wait(shared(&arrived), parity);
    put_rows(multiply_parts(weights, quantized, factors, pairs), sums[parity][warp]);
    __syncthreads();
    if (more && warp == 0) load_rows(weights, w, pairs, next, &arrived);
    if (warp == 0) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < DOWN_WARPS; i += 4) {
        const int from = i + lane / 8;
        sum += DOWN_WARPS % 4 == 0 || from < DOWN_WARPS ? sums[parity][from][lane % 8] : 0.0f;
      }
      sum = sum_of_quarters(sum) + added;
      if (lane < ROWS) y[(ONE_TOKEN ? 0 : (long long)token_of_block * HIDDEN) + row + lane] = (u16)narrow(sum, 0.0f);
    }
    if (!more) return;
    row = next, factors = of_next, added = added_next;
  }
}
