// Products of rows by the weights of their experts on Hopper: warp-specialized and persistent.
//
// First product (ACTIVATED): rows of x by gates and ups, activated and quantized in groups of 1x128.
// Second product: rows of that by the down weights, stored where each pair belongs.
//
// A tile has tokens of one expert. Its rows past the expert's last one are multiplied, as no token
// depends on another, and not stored. A stage holds 128 along K of two halves of weight rows, loaded from
// the checkpoint's own layout, and of the tokens. Few tokens are the MMA's columns, so that they waste no
// MMA; many are its rows, where a warp has whole groups and a thread needs two scales per step.
//
// Pipeline: one producer warp loads weights and one loads tokens, by TMA into one ring. Weights are
// loaded before the previous kernel has ended (PDL): the second product finds the tiles that the kernel
// before that has listed, the first one lists them itself if pairs are few.
//
// Main loop: as in the dense GEMM, each K step of 128 starts from zero and is promoted to fp32 registers.
// With SWAP_AB the half that is promoted is not the half that is multiplied. Without, there are registers
// for one partial sum, and one warpgroup promotes while the other multiplies.
//
// Schedule: see scheduler.cuh. Sums along K are never split, so the bits of a row depend on nothing else.
//
// Parts, in the order of compilation: quantizers/encode.cuh, config.cuh, matmul/hopper/ptx.cuh,
// matmul/hopper/pipeline.cuh, tiles.cuh, scheduler.cuh, epilogue.cuh, columns_epilogue.cuh or
// rows_epilogue.cuh, grouped_gemm.cu.
//
//   macro             unit        meaning
//   SWAP_AB           0 or 1      the MMA's columns are tokens, else a half of the weights
//   MMA_N             columns     of the MMA
//   WARPGROUPS        warpgroups  consumers; each has 64 of the MMA's rows
//   STAGES            stages      of the ring
//   BLOCKS_PER_SM     blocks      occupancy
//   CLUSTER           blocks      that share the 128 features of a group
//   BAND              tiles       of tokens that all weights of an expert pass together
//   PIPELINED_STEPS   K steps     whose promotions overlap the next MMA
//   ACTIVATED         0 or 1      first or second product
//   LISTS             0 or 1      sort few pairs here, to load weights before the tokens are quantized
//   FEW_PAIRS         pairs       that are few
//   GIVEN_SCALE       0 or 1      the result of the first product has a static scale
//   GELU, LIMITED     0 or 1      the activation
//   TOKEN_GROUPS      0 or 1      tokens have a scale per 128 of K, else one
//   WEIGHT_BLOCKS     0 or 1      weights have a scale per 128x128 block, else per row or tensor
//   BIAS_KIND         dtype tag   of the bias
//   KIND              dtype tag   of the second product's result
//   WGMMA, WGMMA_ADD, WGMMA_REGISTERS   the MMA, see source.py

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCER_THREADS, BLOCKS_PER_SM) grouped_gemm(
    const __grid_constant__ TensorMap first_map, const __grid_constant__ TensorMap second_map,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_scale_map,
    const float* x_scale, int x_stride, const float* w_scale, int w_expert_stride, int w_row_stride,
    const void* bias, void* y, float* y_scale, int y_scale_pitch, const int* pair_of_row,
    const TokenTile* tiles, const int* tile_count, const void* ids, int id_bytes, int pairs, int experts,
    int features, int feature_step, int second_row, int expert_rows, int map_rows, int second_map_row,
    int k, int w_tiles, float min_scale, float limit, float alpha, float up_offset) {
  extern __shared__ __align__(1024) u8 smem[];  // aligned to the pattern of the swizzle
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  __shared__ alignas(8) u64 maxima_received;
  __shared__ SharedFacts facts;
  const Barriers full(barriers), empty = full.after(STAGES);
  const u32 w_ring = shared(smem), x_ring = w_ring + STAGES * W_BYTES, scale_ring = x_ring + STAGES * X_BYTES;
  u8* const after_rings = smem + STAGES * (W_BYTES + X_BYTES + SCALE_BYTES);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform
  int rank = 0;
  if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    auto init = [](u32 barrier, int arrivals) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
    };
    for (int s = 0; s < STAGES; s++) {
      init(full[s], 2);
      init(empty[s], 4 * WARPGROUPS);
    }
    init(shared(&maxima_received), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#if LISTS
  __shared__ FewPairs few;
  few.sort({ids, id_bytes, pairs, experts}, CONSUMERS + PRODUCER_THREADS, [](int, int) {});
#endif
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  const int scale_steps = (k + TILE_K - 1) / TILE_K;
  // steps beyond K load zeros
  const int steps = (scale_steps + PIPELINED_STEPS - 1) / PIPELINED_STEPS * PIPELINED_STEPS;
  const int feature_of_block = rank * HALF_ROWS;  // in a tile of features
  const bool producer = warp >= 4 * WARPGROUPS, loads_weights = warp == 4 * WARPGROUPS;
  if (producer && elect_one()) {
    tma_prefetch(loads_weights ? &first_map : &x_map);
    if (loads_weights || TOKEN_GROUPS) tma_prefetch(loads_weights ? &second_map : &x_scale_map);
  }
  if (MOVE_REGISTERS && producer) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  if (producer && warp > 4 * WARPGROUPS + 1) return;
  // what is older than the kernel before this one needs no wait: routes, and for the second product tiles
  if (!(LISTS || !ACTIVATED) || !loads_weights) asm volatile("griddepcontrol.wait;" ::: "memory");
#if LISTS
  TileWalk tile(few.tiles, few.count, w_tiles, BAND, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
#else
  TileWalk tile(tiles, __ldcg(tile_count), w_tiles, BAND, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
#endif

  if (producer) {
    const u64 evict_last = 0x14F0000000000000ull;  // L2 policy
    Stage<STAGES> next;
    // With one tile for each block the next kernel finds room while this one loads, and would delay it.
    const bool several = tile.total > tile.stride;
    if (!loads_weights && several) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (; tile.more(); tile.next()) {
      const int w_row = tile.expert * map_rows + tile.w * TILE_FEATURES + feature_of_block;
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        barrier_wait(empty[next.index], next.parity ^ 1);
        if (elect_one()) {
          const u32 ready = full[next.index], at = w_ring + next.index * W_BYTES;
          if (loads_weights) {
            barrier_expect(ready, W_BYTES);
            tma_load(at, &first_map, step * TILE_K, w_row, ready, evict_last);
            tma_load(at + HALF_BYTES, &second_map, step * TILE_K, w_row + second_map_row, ready, evict_last);
          } else {
            barrier_expect(ready, X_BYTES + (TOKEN_GROUPS ? TILE_TOKENS * 4 : 0));
            tma_load(x_ring + next.index * X_BYTES, &x_map, step * TILE_K, tile.row, ready, evict_last);
            if (TOKEN_GROUPS)
              tma_load(scale_ring + next.index * SCALE_BYTES, &x_scale_map, tile.row, step, ready, evict_last);
          }
        }
        next.advance();
      }
    }
    if (!loads_weights && !several) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    return;
  }

  if (MOVE_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int warpgroup = warp / 4;
  const u32 w_tiles_at = descriptor_low(w_ring) + (SWAP_AB ? warpgroup * (64 * TILE_K / 16) : 0);
  const u32 x_tiles_at = descriptor_low(x_ring) + (SWAP_AB ? 0 : warpgroup * (64 * TILE_K / 16));
  const Factors factors = {x_scale, x_stride, w_scale, w_expert_stride, w_row_stride, bias};
  const Features rows = {features, feature_step, second_row, expert_rows};
  const Gate gate = {limit, alpha, up_offset};
  const Destination to = {y, y_scale, y_scale_pitch, pair_of_row, min_scale};
#if SWAP_AB
  Epilogue epilogue = {facts, after_rings + warpgroup * EPILOGUE_BYTES, shared(&maxima_received), rank};
#else
  Epilogue epilogue = {facts, after_rings + warpgroup * EPILOGUE_BYTES};
#endif
  float acc[2][ACC], partial[PARTIALS][ACC];
  Stage<STAGES> now, done;  // the stage to multiply, the one to promote
  // warpgroups that share nothing work apart, so that one runs MMAs while another runs its epilogue
  if (!(SWAP_AB && ACTIVATED) && warpgroup > 0 && steps > STAGES / 2 && tile.more())
    barrier_wait(full[STAGES / 2], 0);
  for (; tile.more(); tile.next()) {
    // feature of the warpgroup's first row or column, in the first half
    const int feature = tile.w * TILE_FEATURES + feature_of_block + (SWAP_AB ? warpgroup * 64 : 0);
#if !SWAP_AB
    if (tile.row + warpgroup * 64 >= tile.end) {  // the warpgroup has no tokens
      for (int step = 0; step < steps; step++) {
        barrier_wait(full[now.index], now.parity);
        if (lane == 0) barrier_arrive(empty[now.index]);
        now.advance();
        done.advance();
      }
      continue;
    }
#endif
    epilogue.load(tile, factors, rows, feature, to);
    const float* w_scales[2];
    float w_s[2] = {1.0f, 1.0f}, w_next[2] = {1.0f, 1.0f};
    if (WEIGHT_BLOCKS) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        w_scales[half] = w_scale + (long long)tile.expert * w_expert_stride +
                         (long long)(rows.row(feature, half) / 128) * scale_steps;
        w_next[half] = w_scales[half][0];
      }
    }
    auto multiply = [&](float (&sum)[ACC], int half) {
      const u32 w = w_tiles_at + now.index * (W_BYTES / 16) + half * (HALF_BYTES / 16);
      const u32 x = x_tiles_at + now.index * (X_BYTES / 16);
      const u32 a = SWAP_AB ? w : x, b = SWAP_AB ? x : w;
      wgmma_fence_registers(sum);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int j = 0; j < TILE_K / 32; j++) wgmma(sum, descriptor(a + j * 2), descriptor(b + j * 2), j > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };
    auto promote = [&](float (&sum)[ACC], int half, float w) {
      wgmma_fence_registers(sum);
      u32 read = 0;
      if (TOKEN_GROUPS) {
        read = add_scaled(acc[half], sum, scale_ring + done.index * SCALE_BYTES, w);
      } else {
#pragma unroll
        for (int i = 0; i < ACC; i++) acc[half][i] += sum[i];
      }
      if (half == 0) return;
      __syncwarp();
      if (lane == 0) barrier_arrive_after(empty[done.index], read);
      done.advance();
    };
#pragma unroll
    for (int i = 0; i < ACC; i++) acc[0][i] = acc[1][i] = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step += PIPELINED_STEPS) {
#pragma unroll
      for (int i = 0; i < PIPELINED_STEPS; i++) {
        const float w_before = w_s[1];
        if (WEIGHT_BLOCKS) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            w_s[half] = w_next[half];
            w_next[half] = w_scales[half][min(step + i + 1, scale_steps - 1)];
          }
        }
        barrier_wait(full[now.index], now.parity);
        multiply(partial[0], 0);
        if (PARTIALS == 1) {
          wgmma_wait<0>();
        } else {
          if (i > 0) {
            wgmma_wait<1>();
            promote(partial[LAST], 1, w_before);
          }
          multiply(partial[LAST], 1);
          wgmma_wait<1>();
        }
        promote(partial[0], 0, w_s[0]);
        if (PARTIALS == 1) {
          multiply(partial[0], 1);
          wgmma_wait<0>();
          promote(partial[0], 1, w_s[1]);
        }
        now.advance();
      }
      if (PARTIALS == 2) {
        wgmma_wait<0>();
        promote(partial[LAST], 1, w_s[1]);
      }
    }
    epilogue.store(acc, tile, factors, rows, feature, gate, to);
  }
}
