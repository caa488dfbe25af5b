// The activation between the products, and its codes.
//
// Set by the host: whether GELU by tanh replaces SiLU, inputs are LIMITED, and the codes have a GIVEN_SCALE.

struct Gate {
  float limit, alpha, up_offset;
};

// act(gate) * (up + up_offset), gate and up bounded: SiLU with alpha in its sigmoid, or GELU by tanh.
__device__ __forceinline__ float activated(float gate, float up, const Gate& by) {
  if (LIMITED) {
    gate = gate > by.limit ? by.limit : gate;  // NaN stays
    up = up > by.limit ? by.limit : up < -by.limit ? -by.limit : up;
  }
  float power, sigmoid;
  constexpr float LOG2_E = 1.4426950408889634f, TWO_ROOT_2_OVER_PI = 1.5957691216057308f;
  const float exponent = GELU ? -LOG2_E * TWO_ROOT_2_OVER_PI * fmaf(0.044715f * gate * gate, gate, gate)
                              : gate * (-LOG2_E * by.alpha);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return gate * sigmoid * (up + by.up_offset);
}

// Encodes two values, each by its scale. A given scale may be any number, so it divides as IEEE, like the
// reference.
__device__ __forceinline__ u16 encode_pair(float low, float high, float low_scale, float high_scale,
                                           float low_reciprocal, float high_reciprocal) {
  u16 codes;
  low = GIVEN_SCALE ? __fdiv_rn(low, low_scale) : divide(low, low_scale, low_reciprocal);
  high = GIVEN_SCALE ? __fdiv_rn(high, high_scale) : divide(high, high_scale, high_reciprocal);
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
