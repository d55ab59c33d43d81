// Factors of products: TF32.
#pragma once
#include "mma.cuh"

using Product = Tf32;
