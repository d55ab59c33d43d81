// Factors of products: bf16. Values in memory: bf16.
#pragma once
#include "mma.cuh"

using Product = Bf16;
using Value = StoredBf16;
