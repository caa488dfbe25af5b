// The activated gates and ups of a few tokens, in fp32. A block computes 8 features of a pair. It quantizes the token
// for itself while its weights arrive. Of several tokens, neighbouring blocks compute the same features of all pairs,
// so that pairs of one expert read its weights from memory once. dot_products.cuh lists the macros.

constexpr int WHOLE_SPANS = HIDDEN / SPAN, HIDDEN_SPANS = (HIDDEN + SPAN - 1) / SPAN;
constexpr bool SCALED_SPANS = SCALES == 1 || WEIGHT_BLOCKS;

extern "C" __global__ void __launch_bounds__(32 * GATE_WARPS) gates_and_ups(
    const void* ids, int id_bytes, int experts, int tokens, const uint4* x, int x_vectors, const float* given_scale,
    float min_scale, const u8* codes, const float* scale, const void* bias, int rows, int expert_stride,
    int row_stride, int step, int up_row, float limit, float alpha, float up_offset, float* h) {
  extern __shared__ __align__(128) u8 weights[];  // rows of gates, then of ups; or they alternate
  __shared__ uint4 token[HIDDEN_SPANS][2][SPAN / 16];  // fp16; halves of 16 values lie apart, against bank conflicts
  __shared__ float factors[HIDDEN_SPANS], block_factors[2][WEIGHT_BLOCKS ? HIDDEN_SPANS : 1];
  __shared__ float sums[GATE_WARPS][2 * ROWS];
  __shared__ u32 maxima[GATE_WARPS];
  __shared__ u64 arrived;
  const Weights w = {codes, scale, bias, rows, HIDDEN, expert_stride, row_stride};
  const int pairs = tokens * PAIRS, pair = ONE_TOKEN ? blockIdx.x / (INNER / ROWS) : blockIdx.x % pairs;
  const int feature = (ONE_TOKEN ? blockIdx.x % (INNER / ROWS) : blockIdx.x / pairs) * ROWS, row = feature * step;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(shared(&arrived), 1);
    barrier_init_fence();
  }
  __syncwarp();  // racecheck asks for it between the barrier and the copy that arrives there
  // `downs` starts when all blocks have waited here, so it reads the results of earlier kernels without a wait
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const int expert = Routes{ids, id_bytes, pairs, experts}.expert(pair);
  if (expert < 0) return;
  if (threadIdx.x == 0) {
    barrier_expect(shared(&arrived), 2 * ROWS * HIDDEN);
    bulk_load(weights, w.row_of(expert, row), step * ROWS * HIDDEN, shared(&arrived));
    if (step == 1) bulk_load(weights + ROWS * HIDDEN, w.row_of(expert, row + up_row), ROWS * HIDDEN, shared(&arrived));
  }
  HeldToken<32 * GATE_WARPS> held;
  held.load(x + (ONE_TOKEN ? 0 : (long long)(pair / PAIRS) * x_vectors), HIDDEN / EACH);
  // in the first warp, a lane has one gate or one up
  const int of_lane = row + lane % ROWS * step + lane / ROWS % 2 * up_row;
  float factor = 1, added = 0;
  if (warp == 0) {
    if (!WEIGHT_BLOCKS) factor = w.factor(expert, of_lane, 0);
    added = w.added<BIAS_KIND_13>(expert, of_lane);
  }
  if (WEIGHT_BLOCKS)
    for (int i = threadIdx.x; i < 2 * HIDDEN_SPANS; i += 32 * GATE_WARPS)
      block_factors[i / HIDDEN_SPANS][i % HIDDEN_SPANS] =
          w.factor(expert, row + i / HIDDEN_SPANS * up_row, i % HIDDEN_SPANS);
  held.put_maximum(maxima);
  __syncthreads();
  held.quantize(maxima, given_scale, min_scale, HIDDEN_SPANS * SPAN / EACH, [&](int, int at, uint2 bytes, float by) {
    token[at / 16][at % 2][at % 16 / 2] = halves(bytes);
    if (at % (SPAN / EACH) == 0) factors[at / (SPAN / EACH)] = by;
  });
  __syncthreads();
  barrier_wait(shared(&arrived), 0);
  const u8* const ups = weights + (step == 1 ? ROWS : 1) * HIDDEN;
  float2 gate = {0, 0}, up = {0, 0};
  Dot of_gates, of_ups;
  const auto add_up = [&](float by_gate, float by_up) {
    const float2 of_gate = of_gates.of_half(), of_up = of_ups.of_half();
    gate = {gate.x + of_gate.x * by_gate, gate.y + of_gate.y * by_gate};
    up = {up.x + of_up.x * by_up, up.y + of_up.y * by_up};
  };
  const auto multiply = [&](int span, bool inside) {
    const uint4 x[2] = {token[span][0][lane % 8], token[span][1][lane % 8]};
    if (SCALED_SPANS) of_gates = of_ups = {};
    of_gates.add(weights + span * SPAN, step * HIDDEN, inside, x);
    of_ups.add(ups + span * SPAN, step * HIDDEN, inside, x);
    if (!SCALED_SPANS) return;
    const float by = SCALES == 1 ? factors[span] : 1.0f;
    add_up(WEIGHT_BLOCKS ? by * block_factors[0][span] : by, WEIGHT_BLOCKS ? by * block_factors[1][span] : by);
  };
#pragma unroll(SCALED_SPANS ? 2 : 4)
  for (int span = warp; span < WHOLE_SPANS; span += GATE_WARPS) multiply(span, true);
  if (WHOLE_SPANS < HIDDEN_SPANS && warp == WHOLE_SPANS % GATE_WARPS)
    multiply(WHOLE_SPANS, lane % 8 * 16 < HIDDEN % SPAN);
  if (!SCALED_SPANS) add_up(1, 1);
  put_rows(gate, sums[warp]);
  put_rows(up, sums[warp] + ROWS);
  __syncthreads();
  if (warp > 0) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < GATE_WARPS; i++) sum += sums[i][lane % (2 * ROWS)];
  if (SCALES != 1) sum *= factors[0];
  sum = sum * factor + added;
  const float raised = __shfl_down_sync(~0u, sum, ROWS);
  if (lane < ROWS) h[(long long)pair * INNER + feature + lane] = activated(sum, raised, {limit, alpha, up_offset});
}
