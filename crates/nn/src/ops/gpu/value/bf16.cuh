// Values in memory: bf16.
#pragma once
#include "nn.cuh"

using Value = StoredBf16;
