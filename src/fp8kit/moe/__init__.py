"""Mixture of experts: routing, and the layer of experts in FP8. The public functions."""

from fp8kit.moe.activation import Activation as Activation
from fp8kit.moe.functional import experts as experts
from fp8kit.moe.functional import grouped_scaled_mm as grouped_scaled_mm
from fp8kit.moe.routing import route as route
from fp8kit.moe.routing import tokens_per_expert as tokens_per_expert
