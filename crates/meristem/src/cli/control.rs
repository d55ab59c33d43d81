//! What `meristem control` takes.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use meristem::train::settings::ControllerKind;
use meristem::train::study::Contender;

use super::SettingArguments;
use crate::plot::PlotFile;

#[derive(Debug, Subcommand)]
pub(crate) enum ControlCommand {
    /// Compare controllers on fresh hosts: test accuracy, parameters, and the paired difference to the first.
    ///
    /// For each seed everybody gets the same hosts, the same split and the same order of samples, and one episode of
    /// --steps. A policy from a file does not learn; it draws its actions (ppo:FILE) or takes the most probable one
    /// (greedy:FILE). `ppo` and `ppo@REWARD` learn first, for --rounds on other hosts, a new policy for each seed.
    /// Spreads are standard deviations over the seeds; what counts of a seed is the mean over its envs. Training
    /// starts from --seed 42 where nothing else is said, and this from 1000: a policy meets hosts that it does not know. (A
    /// policy's file has the seeds that it learned with; comparing it with one of them is warned of.)
    Eval(Box<ControlEvalArguments>),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ControlEvalArguments {
    /// Who is compared: none, random, heuristic, ppo:FILE, greedy:FILE, fixed:FILE, ppo or ppo@REWARD; differences are
    /// to the first [default: none,random,heuristic]
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Comparison")]
    controllers: Vec<Contender>,
    /// A policy that takes part too, as ppo:FILE in the list above does; may be given several times
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    policy: Vec<PathBuf>,
    /// Number of seeds: --seed, and those that follow it
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Comparison")]
    pub(crate) seeds: usize,
    /// Draw accuracy against parameters into this file, .svg or .png; must not exist
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    pub(crate) plot: Option<PlotFile>,
    /// Keep every run, and study.json, in this folder; must not exist [default: runs are thrown away]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub(crate) run_dir: Option<PathBuf>,
    /// No progress on stderr
    #[arg(long, help_heading = "Run")]
    pub(crate) quiet: bool,
    /// Print the comparison as JSON instead of a table
    #[arg(long, help_heading = "Run")]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) settings: SettingArguments<false>,
}

impl ControlEvalArguments {
    /// Who is compared.
    pub(crate) fn contenders(&self) -> Vec<Contender> {
        let mut contenders = self.controllers.clone();
        if contenders.is_empty() {
            let usual = [ControllerKind::None, ControllerKind::Random, ControllerKind::Heuristic];
            contenders.extend(usual.map(Contender::Controller));
        }
        let policy = |path: &PathBuf| Contender::Controller(ControllerKind::Policy(path.clone()));
        contenders.extend(self.policy.iter().map(policy));
        contenders
    }
}
