// Factors of products: f32. Values in memory: f32.
#pragma once
#include "mma.cuh"

using Product = F32;
using Value = float;
