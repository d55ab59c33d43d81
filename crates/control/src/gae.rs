//! Generalised advantage estimation (Schulman et al., ICLR 2016), with termination and truncation.

/// Inputs of the estimation; every slice is `[steps, envs]`.
#[derive(Clone, Copy, Debug)]
pub struct Trajectories<'a> {
    /// Number of envs: the length of a row.
    pub envs: usize,
    /// Reward of each transition.
    pub rewards: &'a [f32],
    /// V of the observation before each transition, in units of reward.
    pub values: &'a [f32],
    /// V of the observation after a transition with `truncated`; ignored for all other transitions.
    pub bootstraps: &'a [f32],
    /// 1 where a limit cut the episode off. V of the next observation replaces the rewards to come.
    pub truncated: &'a [u8],
    /// 1 where the episode ended, so that no rewards follow. Takes precedence over `truncated`.
    pub terminated: &'a [u8],
}

/// Discount factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Discounts {
    /// γ of rewards.
    pub gamma: f64,
    /// λ of the estimator.
    pub lambda: f64,
}

/// Writes the advantages `[steps, envs]` A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t.
/// Computed in f64. The return of a transition is its advantage plus its value.
///
/// At a termination V_{t+1} is 0, at a truncation it is the bootstrap; after either, A_{t+1} is 0.
/// The last step counts as a termination unless a flag is set.
pub fn advantages(trajectories: &Trajectories<'_>, discounts: Discounts, advantages: &mut [f32]) {
    let Discounts { gamma, lambda } = discounts;
    let envs = trajectories.envs.max(1);
    let steps = advantages.len() / envs;
    for env in 0..envs {
        let mut next = 0.0; // A_{t+1}
        for step in (0..steps).rev() {
            let at = step * envs + env;
            let (terminated, truncated) =
                (trajectories.terminated[at] != 0, trajectories.truncated[at] != 0);
            let ends = terminated || truncated || step + 1 == steps;
            let next_value = match (terminated, truncated) {
                (true, _) => 0.0,
                (false, true) => f64::from(trajectories.bootstraps[at]),
                (false, false) => {
                    trajectories.values.get(at + envs).copied().map_or(0.0, f64::from)
                }
            };
            let delta = f64::from(trajectories.rewards[at]) + gamma * next_value
                - f64::from(trajectories.values[at]);
            next = delta + if ends { 0.0 } else { gamma * lambda * next };
            advantages[at] = next as f32;
        }
    }
}
