// Rewards and targets of a round on a GPU. The bits are those of targets.rs and gae.rs: everything
// is f64 and in the same order. A round has a few thousand transitions at most, and this runs once
// for each, so one thread does what has one order.
#include "meristem.cuh"

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;

// As `gpu::ROW` in gpu.rs.
struct Rewards {
    float rewards[256];
};

// Adds to the rewards of a step.
extern "C" __global__ void __launch_bounds__(256) reward(Span<float> row, Rewards of) {
    locate(row);
    if (first() < row.len) row[first()] += of.rewards[first()];
}

// Running moments: `ReturnScale`.
struct Moments {
    double count, mean, m2;

    __device__ void push(double x) {
        count += 1.0;
        double delta = x - mean;
        mean += delta / count;
        m2 += delta * (x - mean);
    }

    __device__ double std() const {
        double root = sqrt(m2 / count);
        return count < 2.0 ? 1.0 : root > 1e-3 ? root : 1e-3;
    }
};

struct Values {
    double gamma;
    double lambda;
    double floor;  // least divisor in the normalisation of advantages
    Moments scale;
    u32 envs;
    u32 part;  // whether these are some of the envs: nothing is normalised yet
};

struct Trajectories {
    Span<const float> rewards, values, bootstraps;
    Span<const u8> truncated, terminated;
};

// Generalised advantage estimation of one env.
__device__ void advantages(const Trajectories& of, const Values& v, u32 env, Span<float> a) {
    i64 steps = a.len / v.envs;
    double next = 0.0;
    for (i64 step = steps - 1; step >= 0; step--) {
        i64 at = step * v.envs + env;
        bool terminated = of.terminated[at] != 0, truncated = of.truncated[at] != 0;
        bool last = step + 1 == steps;
        double next_value = terminated  ? 0.0
                            : truncated ? (double)of.bootstraps[at]
                            : last      ? 0.0
                                        : (double)of.values[at + v.envs];
        double delta = (double)of.rewards[at] + v.gamma * next_value - (double)of.values[at];
        next = delta + (terminated || truncated || last ? 0.0 : v.gamma * v.lambda * next);
        a[at] = (float)next;
    }
}

__device__ void normalise_all(double returns_std, double mean, double std, Span<float> a,
                              Span<float> returns) {
    for (i64 i = 0; i < returns.len; i++) returns[i] = (float)((double)returns[i] / returns_std);
    for (i64 i = 0; i < a.len; i++) a[i] = (float)(((double)a[i] - mean) / std);
}

// Writes advantages and returns; the first numbers of `stats` are the moments of the returns, for a
// part those of its advantages too, and the seventh is the mean sum of rewards of an env. One block.
extern "C" __global__ void targets(Span<const float> rewards, Span<const float> values,
                                   Span<const float> bootstraps, Span<const u8> truncated,
                                   Span<const u8> terminated, Span<float> a, Span<float> returns,
                                   Span<double> stats, Values v) {
    locate(rewards, values, bootstraps, truncated, terminated, a, returns, stats);
    Trajectories of = {rewards, values, bootstraps, truncated, terminated};
    for (u32 env = threadIdx.x; env < v.envs; env += blockDim.x) advantages(of, v, env, a);
    __syncthreads();
    if (threadIdx.x != 0) return;
    Moments scale = v.scale, part = {0.0, 0.0, 0.0};
    for (i64 i = 0; i < returns.len; i++) {
        returns[i] = a[i] + values[i];
        scale.push((double)returns[i]);
    }
    if (v.part) {
        for (i64 i = 0; i < a.len; i++) part.push((double)a[i]);
    } else {
        double n = (double)(a.len > 1 ? a.len : 1), sum = 0.0, squares = 0.0;
        for (i64 i = 0; i < a.len; i++) sum += (double)a[i];
        double mean = sum / n;
        for (i64 i = 0; i < a.len; i++) squares += ((double)a[i] - mean) * ((double)a[i] - mean);
        double std = sqrt(squares / n);
        normalise_all(scale.std(), mean, std > v.floor ? std : v.floor, a, returns);
    }
    double paid = 0.0;
    for (i64 i = 0; i < rewards.len; i++) paid += (double)rewards[i];
    double found[7] = {scale.count, scale.mean, scale.m2, part.count, part.mean, part.m2,
                       paid / (double)v.envs};
    for (int i = 0; i < 7; i++) stats[i] = found[i];
}

struct Norm {
    double returns_std;
    double mean;
    double std;
};

// One thread.
extern "C" __global__ void normalise(Span<float> a, Span<float> returns, Norm of) {
    locate(a, returns);
    normalise_all(of.returns_std, of.mean, of.std, a, returns);
}
