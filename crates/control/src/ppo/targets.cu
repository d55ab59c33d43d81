// Rewards and targets of a round on a GPU. The results have the same bits as targets.rs and gae.rs:
// the same operations in the same order. A round has at most a few thousand transitions, and its
// targets are computed once. Therefore one warp does each ordered sum; all threads share the rest.
#include "meristem.cuh"

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;

// Length: `gpu::ROW` in gpu.rs.
struct Rewards {
    float rewards[256];
};

// Adds rewards to a row.
extern "C" __global__ void __launch_bounds__(256) reward(Span<float> row, Rewards of) {
    locate(row);
    if (first() < row.len) row[first()] += of.rewards[first()];
}

// Running moments; `ScalarMoments` in targets.rs.
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
    u32 part;  // whether nothing is normalised yet, and the advantages' moments are wanted
};

struct Trajectories {
    Span<const float> rewards, values, bootstraps;
    Span<const u8> truncated, terminated;
};

// Temporal difference of a transition, and whether the trajectory ends with it.
struct Transition {
    double delta;
    bool ends;

    __device__ Transition(const Trajectories& of, const Values& v, i64 at, bool last) {
        bool terminated = of.terminated[at] != 0, truncated = of.truncated[at] != 0;
        double next_value = terminated  ? 0.0
                            : truncated ? (double)of.bootstraps[at]
                            : last      ? 0.0
                                        : (double)of.values[at + v.envs];
        delta = (double)of.rewards[at] + v.gamma * next_value - (double)of.values[at];
        ends = terminated || truncated || last;
    }
};

// Generalised advantage estimation of one env. Threads of a warp take adjacent envs. The next
// transition is loaded while an advantage is written.
__device__ void advantages(const Trajectories& of, const Values& v, u32 env, Span<float> a) {
    if (a.len == 0) return;
    i64 at = a.len - v.envs + env;
    double advantage = 0.0;
    for (Transition now(of, v, at, true); at >= 0; at -= v.envs) {
        Transition before = at >= v.envs ? Transition(of, v, at - v.envs, false) : now;
        advantage = now.delta + (now.ends ? 0.0 : v.gamma * v.lambda * advantage);
        a[at] = (float)advantage;
        now = before;
    }
}

// Calls `take` for each element in order. The lanes of a warp load the elements together; every
// lane then takes every element.
template <class Take>
__device__ void in_order(Span<const float> x, Take take) {
    u32 lane = threadIdx.x % 32;
    float next = lane < x.len ? x[lane] : 0.0f;
    for (i64 begin = 0; begin < x.len; begin += 32) {
        float own = next;
        if (begin + 32 + lane < x.len) next = x[begin + 32 + lane];
        u32 count = (u32)min(x.len - begin, 32ll);
        for (u32 i = 0; i < count; ++i) take((double)__shfl_sync(0xffffffffu, own, i));
    }
}

__device__ double sum_of(Span<const float> x) {
    double sum = 0.0;
    in_order(x, [&](double x) { sum += x; });
    return sum;
}

struct Norm {
    double returns_std;
    double mean;
    double std;
};

// Called by all threads of the grid.
__device__ void normalise_all(const Norm& of, Span<float> a, Span<float> returns) {
    for (i64 i = first(); i < returns.len; i += threads()) {
        returns[i] = (float)((double)returns[i] / of.returns_std);
    }
    for (i64 i = first(); i < a.len; i += threads()) {
        a[i] = (float)(((double)a[i] - of.mean) / of.std);
    }
}

// Mean of the advantages, and the larger of their standard deviation and the floor.
__device__ void moments(Span<const float> a, double floor, Norm& to) {
    double n = (double)(a.len > 1 ? a.len : 1), squares = 0.0;
    double mean = sum_of(a) / n;
    in_order(a, [&](double x) { squares += (x - mean) * (x - mean); });
    double std = sqrt(squares / n);
    to.mean = mean, to.std = std > floor ? std : floor;
}

// Writes advantages and returns in one block. `stats` receives the moments of the returns (3), the
// moments of the advantages (3; 0 unless `v.part`), and the mean sum of rewards (1).
extern "C" __global__ void __launch_bounds__(256)
    targets(Span<const float> rewards, Span<const float> values, Span<const float> bootstraps,
            Span<const u8> truncated, Span<const u8> terminated, Span<float> a, Span<float> returns,
            Span<double> stats, Values v) {
    locate(rewards, values, bootstraps, truncated, terminated, a, returns, stats);
    __shared__ Moments scale, part;
    __shared__ Norm norm;
    __shared__ double paid;
    Trajectories of = {rewards, values, bootstraps, truncated, terminated};
    for (u32 env = threadIdx.x; env < v.envs; env += blockDim.x) advantages(of, v, env, a);
    __syncthreads();
    for (i64 i = threadIdx.x; i < returns.len; i += blockDim.x) returns[i] = a[i] + values[i];
    __syncthreads();
    Span<const float> advantages = {a.data, a.len};
    u32 warp = threadIdx.x / 32;
    bool leads = threadIdx.x % 32 == 0;
    if (warp == 0) {
        Moments all = v.scale;
        in_order({returns.data, returns.len}, [&](double x) { all.push(x); });
        if (leads) scale = all, norm.returns_std = all.std();
    } else if (warp == 1) {
        Moments own = {0.0, 0.0, 0.0};
        Norm of = {};
        if (v.part) {
            in_order(advantages, [&](double x) { own.push(x); });
        } else {
            moments(advantages, v.floor, of);
        }
        if (leads) part = own, norm.mean = of.mean, norm.std = of.std;
    } else if (warp == 2) {
        double sum = sum_of(rewards);
        if (leads) paid = sum;
    }
    __syncthreads();
    if (!v.part) normalise_all(norm, a, returns);
    if (threadIdx.x != 0) return;
    stats[0] = scale.count, stats[1] = scale.mean, stats[2] = scale.m2;
    stats[3] = part.count, stats[4] = part.mean, stats[5] = part.m2;
    stats[6] = paid / (double)v.envs;
}

extern "C" __global__ void __launch_bounds__(256)
    normalise(Span<float> a, Span<float> returns, Norm of) {
    locate(a, returns);
    normalise_all(of, a, returns);
}
