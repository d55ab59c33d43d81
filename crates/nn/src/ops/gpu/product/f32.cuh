// Factors of products: f32.
#pragma once
#include "mma.cuh"

using Product = F32;
