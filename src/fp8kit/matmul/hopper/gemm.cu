// y[M, N] = (x[M, K] @ w[N, K].T) * scales + bias on Hopper: warp-specialized and persistent.
//
// Tile: 64 MMA rows per consumer warpgroup by MMA_N columns. SWAP_AB puts weights in the rows and
// tokens in the columns, so that few tokens waste no MMA. With many tokens, tokens may be the rows: where
// weights then divide into tiles better, or with block scales, as a thread then needs two scales per step
// instead of two per eight columns.
//
// Pipeline: one producer warp loads weights and one loads tokens, each by TMA into a ring of stages.
// With PDL, weight loads start before the previous kernel, which quantizes x, has ended. At most
// WARMUP_INFLIGHT of them are in flight until the first tokens arrive, then MAX_INFLIGHT: more would
// delay the loads of the tokens and of the quantizer.
//
// Main loop: the tensor core keeps about 14 bits of a sum, so each K step of 128 starts from zero and is
// promoted: added to fp32 registers. Of PIPELINED_STEPS steps, each is promoted while the MMA of the
// next runs. Warpgroups work SKEW steps apart, so that one runs MMAs while another runs its epilogue.
//
// Schedule: each block computes tile after tile. A last wave with too few tiles for all blocks is split
// along K in clusters. Partial sums are added in a fixed order, so bits do not depend on timing.
//
// With QUANTIZE_ROWS the tokens have 16 bits and each block quantizes those that it multiplies, which
// saves a kernel and the wait for it.
//
// No pointer is __restrict__, since the previous kernel may still write the memory behind it.
//
// Parts, in the order of compilation: quantizers/encode.cuh, config.cuh, barriers.cuh, ptx.cuh,
// pipeline.cuh, scheduler.cuh, epilogue.cuh, quantize.cuh, gemm.cu.
//
// Macros. "config" is a TileConfig (tile_config.py), "variant" a Variant (source.py).
//
//   macro                unit        set by                            meaning
//   MMA_N                columns     config.layout                     columns of a tile: 8 or a multiple of 16
//   WARPGROUPS           warpgroups  config.layout                     consumers; each has 64 rows of a tile
//   SWAP_AB              0 or 1      config.layout                     weights are the MMA's rows, tokens its columns
//   WEIGHT_STAGES        stages      config.pipeline                   weight tiles of 128 along K in shared memory
//   TOKEN_STAGES         stages      config.pipeline                   token tiles likewise
//   PIPELINED_STEPS      K steps     config.pipeline                   steps whose promotion overlaps the next MMA
//   MAX_INFLIGHT         stages      config.pipeline                   weight loads in flight
//   WARMUP_INFLIGHT      stages      config.pipeline                   the same until the first tokens are here
//   EPILOGUE_COLS        columns     config                            columns of a tile that are stored at once
//   EPILOGUE_BUFFERS     buffers     config.epilogue                   parts of a tile in shared memory together
//   SPLIT_K              blocks      config.launch                     cluster that splits K of a tile
//   BLOCKS_PER_SM        blocks      config.launch                     occupancy
//   CLUSTER_SYNC_EVERY   K steps     config.launch, variant            between synchronizations of a cluster; 0: never
//   PRODUCER_THREADS     threads     config                            of a block, beside the consumers
//   LAUNCH_REGISTERS     registers   config                            per thread at launch; 0: by launch bounds
//   CONSUMER_REGISTERS   registers   config                            per consumer thread afterwards; 0: unchanged
//   PRODUCER_REGISTERS   registers   tile_config.py                    per producer thread afterwards
//   QUANTIZE_ROWS        rows        config.quantize                   tokens to quantize here, a power of two; 0: codes
//   QUANTIZE_VECTORS     vectors     config.quantize                   of 16 bytes that a thread quantizes
//   BLOCK_SCALES         0 or 1      variant                           1x128 by 128x128 scales, else row or tensor
//   ONE_TOKEN_TILE       0 or 1      variant                           all tokens fit one tile: weights are read once
//   TMA_STORE            0 or 1      variant                           TMA stores y, else threads do
//   OUT_KIND             dtype tag   variant                           of y: 32 fp32, 8 bf16, 16 fp16
//   BIAS_KIND            dtype tag   variant                           of the bias
//   KIND                 dtype tag   variant                           of 16-bit tokens, read by encode.cuh
//   WGMMA                PTX         source.py                         the MMA with its registers spelled out
//   WGMMA_ADD            PTX         source.py                         the operand that says whether to accumulate
//   WGMMA_REGISTERS      constraints source.py                         the accumulators of the asm statement

// A block's register allocation is fixed at launch, and setmaxnreg only redistributes it, so the number
// must be exact. Launch bounds would give 128 or 168.
#if LAUNCH_REGISTERS > 0
#define REGISTER_LIMIT __maxnreg__(LAUNCH_REGISTERS)
#else
#define REGISTER_LIMIT __launch_bounds__(CONSUMERS + PRODUCER_THREADS, BLOCKS_PER_SM)
#endif

extern "C" __global__ void REGISTER_LIMIT hopper_gemm(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap x_scale_map, const __grid_constant__ TensorMap y_map,
    const float* x_scale, const float* w_scale, const void* bias, void* y, int m, int n, int k,
    int x_stride, int w_stride, int band, u32 band_inverse, int full_waves, const u8* dense_x,
    long long dense_x_row_bytes, float min_scale) {
  extern __shared__ __align__(1024) u8 smem[];  // aligned to the pattern of the swizzle
  __shared__ alignas(8) u64 barriers[2 * (WEIGHT_STAGES + TOKEN_BARRIERS)];
  const Barriers w_full(barriers), w_empty = w_full.after(WEIGHT_STAGES);
  const Barriers x_full = w_empty.after(WEIGHT_STAGES), x_empty = x_full.after(TOKEN_BARRIERS);
  __shared__ alignas(8) u64 partials_received, peer_arrived;
  __shared__ ScalesAndBias scales;
  const u32 w_ring = shared(smem), x_ring = w_ring + WEIGHT_STAGES * W_BYTES;
  const u32 scale_ring = x_ring + TOKEN_STAGES * X_BYTES;
  // partial sums from peers, then epilogue buffers
  u8* const after_rings = smem + WEIGHT_STAGES * W_BYTES + TOKEN_STAGES * X_BYTES + ALL_SCALE_BYTES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform
  const int rank = SPLIT_K > 1 ? cluster_rank() : 0;
  const Output output = {SWAP_AB ? w_scale : x_scale, SWAP_AB ? x_scale : w_scale, bias, y, m, n,
                         SWAP_AB ? w_stride : x_stride, SWAP_AB ? x_stride : w_stride};
  // overlaps the previous kernel
  TileScheduler tile({band, band_inverse, full_waves}, m, n, k, rank);

  if (threadIdx.x == 0) {
    for (int s = 0; s < WEIGHT_STAGES; s++) {
      barrier_init(w_full[s], 1);
      barrier_init(w_empty[s], RELEASES * WARPGROUPS);
    }
    for (int s = 0; s < TOKEN_BARRIERS; s++) {
      barrier_init(x_full[s], 1);
      barrier_init(x_empty[s], RELEASES * WARPGROUPS);
    }
    barrier_init(shared(&partials_received), 1);
    if (CLUSTER_SYNC_EVERY > 0) barrier_init(shared(&peer_arrived), 2);
    barrier_init_fence();
    if (SPLIT_K > 1)
      barrier_expect(shared(&partials_received),
                     (SPLIT_K - 1) *
                         max(0, min(OWNED_FRAGMENTS, FRAGMENTS - rank * OWNED_FRAGMENTS)) *
                         CONSUMERS * 16);
  }
  __syncthreads();
  const bool cluster_sync = CLUSTER_SYNC_EVERY > 0 && tile.schedule.full_waves > 1;
  if (SPLIT_K > 1 || cluster_sync) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  if (cluster_sync) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // both are initialised

  if (warp >= 4 * WARPGROUPS) {
    if (CONSUMER_REGISTERS > 0)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    const u64 evict_first = 0x12F0000000000000ull, evict_last = 0x14F0000000000000ull;  // L2 policies
    if (warp == 4 * WARPGROUPS) {
      if (elect_one()) tma_prefetch(&w_map);
      ClusterPeer peer(&peer_arrived);
      Stage<WEIGHT_STAGES> next, oldest;
      bool tokens_here = QUANTIZE_ROWS;
      for (int inflight = 0; tile.more(); tile.next())
#pragma unroll 1
        for (int step = 0; step < tile.step_count; step++) {
          if (cluster_sync && tile.wave < tile.schedule.full_waves &&
              step % max(CLUSTER_SYNC_EVERY, 1) == CLUSTER_SYNC_EVERY - 1)
            peer.synchronize();
          barrier_wait(w_empty[next.index], next.parity ^ 1);
          // a missed phase is seen one round of the ring later, which only prolongs the warmup
          if (WARMUP_INFLIGHT < WEIGHT_STAGES && !tokens_here) tokens_here = barrier_test(x_full[0], 0);
          if (WARMUP_INFLIGHT < WEIGHT_STAGES &&
              ++inflight > (tokens_here ? MAX_INFLIGHT : WARMUP_INFLIGHT)) {
            barrier_wait(w_full[oldest.index], oldest.parity);
            oldest.advance();
            inflight--;
          }
          if (elect_one()) {
            barrier_expect(w_full[next.index], W_BYTES);
            tma_load(w_ring + next.index * W_BYTES, &w_map, (tile.first_step + step) * TILE_K, tile.n0,
                     w_full[next.index], ONE_TOKEN_TILE ? evict_first : evict_last);
          }
          next.advance();
        }
    } else if (warp == 4 * WARPGROUPS + 1) {
      if (!QUANTIZE_ROWS && elect_one()) {
        tma_prefetch(&x_map);
        if (BLOCK_SCALES) tma_prefetch(&x_scale_map);
      }
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      Stage<TOKEN_STAGES> next;
      for (; tile.more() && !QUANTIZE_ROWS; tile.next())
#pragma unroll 1
        for (int step = 0; step < tile.step_count; step++) {
          barrier_wait(x_empty[next.index], next.parity ^ 1);
          if (elect_one()) {
            const u32 full = x_full[next.index];
            barrier_expect(full, X_BYTES + (BLOCK_SCALES ? TILE_TOKENS * 4 : 0));
            tma_load(x_ring + next.index * X_BYTES, &x_map, (tile.first_step + step) * TILE_K, tile.t0,
                     full, evict_last);
            if (BLOCK_SCALES)
              tma_load(scale_ring + next.index * SCALE_BYTES, &x_scale_map, tile.t0,
                       tile.first_step + step, full, evict_last);
          }
          next.advance();
        }
    }
    return;
  }

  if (CONSUMER_REGISTERS > 0)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int warpgroup = warp / 4;
  u8* const epilogue_buffers =
      after_rings + (SPLIT_K - 1) * PARTIAL_BYTES + warpgroup * EPILOGUE_BUFFERS * EPILOGUE_BYTES;
  const u32 w_tiles = descriptor_low(w_ring) + (SWAP_AB ? warpgroup * (64 * TILE_K / 16) : 0);
  const u32 x_tiles = descriptor_low(x_ring) + (SWAP_AB ? 0 : warpgroup * (64 * TILE_K / 16));
  float acc[ACC], partial[PIPELINED_STEPS == 1 ? 1 : 2][ACC];
  Stage<WEIGHT_STAGES> w, w_done;  // the next stage to multiply, and to promote
  Stage<TOKEN_STAGES> x, x_done;
  // the K step of the first quantized stage
  const int quantized_step = full_waves == 0 && tile.splits() ? tile.first_step : 0;
  if (QUANTIZE_ROWS)
    quantize_tokens({dense_x, dense_x_row_bytes, m, k, min_scale}, x_ring, scale_ring, scales,
                    quantized_step);
  if (SKEW > 0 && warpgroup > 0 && tile.waves() > 1 && tile.steps > SKEW * warpgroup)
    barrier_wait(w_full[SKEW * warpgroup], 0);
  for (; tile.more(); tile.next()) {
    const int n0 = tile.n0, t0 = tile.t0;
    const int row0 = SWAP_AB ? n0 : t0, col0 = SWAP_AB ? t0 : n0;
    float biases[THREAD_BIASES];
    scales.load_scales(output, row0, col0);
    ScalesAndBias::load_biases(output, biases, n0);
#if BLOCK_SCALES
    float w_s[2][W_BLOCKS];
    const float* w_scales[W_BLOCKS];
    const int w_block = min(n0 + (SWAP_AB ? warpgroup * 64 : 0), n - 1) / 128;
    for (int b = 0; b < W_BLOCKS; b++)
      w_scales[b] = w_scale + (long long)min(w_block + b, (n - 1) / 128) * tile.steps;
#endif
    int step = 0;
    if (QUANTIZE_ROWS) x.index = x_done.index = tile.first_step - quantized_step;
    auto issue_mma = [&](int i) {
#if BLOCK_SCALES
#pragma unroll
      for (int b = 0; b < W_BLOCKS; b++)
        w_s[i][b] = w_scales[b][min(tile.first_step + step, tile.steps - 1)];
#endif
      step++;
      barrier_wait(w_full[w.index], w.parity);
      if (!QUANTIZE_ROWS) barrier_wait(x_full[x.index], x.parity);
      const u32 w_tile = w_tiles + w.index * (W_BYTES / 16);
      const u32 x_tile = x_tiles + x.index * (X_BYTES / 16);
      const u32 a = SWAP_AB ? w_tile : x_tile, b = SWAP_AB ? x_tile : w_tile;
      wgmma_fence_registers(partial[i]);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int j = 0; j < TILE_K / 32; j++)
        wgmma(partial[i], descriptor(a + j * 2), descriptor(b + j * 2), j > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      w.advance();
      x.advance();
    };
    auto promote = [&](int i) {
      wgmma_fence_registers(partial[i]);
      const u32 w_released = w_empty[w_done.index], x_released = x_empty[QUANTIZE_ROWS ? 0 : x_done.index];
#if BLOCK_SCALES
      auto release = [&](u32 read) {
        __syncwarp();
        if (lane > 0) return;
        barrier_arrive(w_released);
        if (!QUANTIZE_ROWS) barrier_arrive_after(x_released, read);
      };
      const u32 at = scale_ring + x_done.index * SCALE_BYTES;
      if (SWAP_AB) {
        u32 read = 0;
#pragma unroll
        for (int j = 0; j < ACC; j += 4) {
          float even, odd;
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(even), "=f"(odd)
                       : "r"(at + lane % 4 * 8 + j * 8));
          read |= __float_as_uint(even);
          even *= w_s[i][0];
          odd *= w_s[i][0];
          acc[j] += partial[i][j] * even;
          acc[j + 1] += partial[i][j + 1] * odd;
          acc[j + 2] += partial[i][j + 2] * even;
          acc[j + 3] += partial[i][j + 3] * odd;
        }
        release(read);
      } else {
        float s[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(s[half])
                       : "r"(at + (warp * 16 + half * 8 + lane / 4) * 4));
        release(__float_as_uint(s[0]) | __float_as_uint(s[1]));
        // accumulators of one block of weights, as tiles start at multiples of MMA_N
        constexpr int ONE_BLOCK = W_BLOCKS == 1 ? ACC : (MMA_N & -MMA_N) / 2;
#pragma unroll
        for (int from = 0; from < ACC; from += ONE_BLOCK) {
          const bool second = W_BLOCKS > 1 && from * 2 >= 128 - n0 % 128;
          const float w_f = second ? w_s[i][W_BLOCKS - 1] : w_s[i][0];
          const float factor[2] = {s[0] * w_f, s[1] * w_f};
#pragma unroll
          for (int j = from; j < from + ONE_BLOCK; j++)
            acc[j] += partial[i][j] * factor[j % 4 / 2];
        }
      }
#else
      if (warp % 4 == 0 && lane == 0) {  // the warpgroup waited for the MMA as one
        barrier_arrive(w_released);
        if (!QUANTIZE_ROWS) barrier_arrive(x_released);
      }
#pragma unroll
      for (int j = 0; j < ACC; j++) acc[j] += partial[i][j];
#endif
      w_done.advance();
      x_done.advance();
    };
#pragma unroll
    for (int i = 0; i < ACC; i++) acc[i] = 0;
    while (step < tile.step_count) {
#pragma unroll
      for (int i = 0; i < PIPELINED_STEPS; i++) {
        issue_mma(i % 2);
        if (i > 0) {
          wgmma_wait<1>();
          promote((i - 1) % 2);
        }
      }
      wgmma_wait<0>();
      promote((PIPELINED_STEPS - 1) % 2);
    }
    if (tile.splits()) reduce_split_k(acc, shared(after_rings), shared(&partials_received), rank);
    scales.finish_loads(output, biases);
    if (TMA_STORE && warp % 4 == 0 && elect_one()) tma_store_wait_read();  // of the previous tile
    warpgroup_barrier(warpgroup);
    apply_scales_and_bias(output, acc, scales);
    store_tile(output, &y_map, acc, epilogue_buffers, warp, tile.splits() ? rank : -1, n0, t0);
  }
  if (TMA_STORE && warp % 4 == 0 && elect_one()) tma_store_wait_read();
}
