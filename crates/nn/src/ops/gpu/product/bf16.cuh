// Factors of products: bf16.
#pragma once
#include "mma.cuh"

using Product = Bf16;
