// Values in memory: f32.
#pragma once
#include "nn.cuh"

using Value = float;
