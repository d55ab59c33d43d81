// Factors of products: TF32. Values in memory: f32.
#pragma once
#include "mma.cuh"

using Product = Tf32;
using Value = float;
