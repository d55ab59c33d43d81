//! Arguments of `meristem control`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use meristem::train::settings::ControllerKind;
use meristem::train::study::Contender;

use super::SettingArguments;
use crate::plain::listed;
use crate::plot::PlotFile;

#[derive(Debug, Subcommand)]
pub(crate) enum ControlCommand {
    /// Compare controllers on fresh hosts.
    ///
    /// For each seed, every controller gets the same hosts, the same control split and the same
    /// order of samples, for one episode of --steps. The table has test scores, parameters,
    /// compute, and paired differences from the first controller. Values are means over the seeds,
    /// with 95 % intervals; the value of a seed is the mean over its envs.
    ///
    /// static@CONTROLLER trains the final networks of an earlier controller of the list, from new
    /// weights and for the same number of steps: the comparison at equal parameters.
    /// static-compute@CONTROLLER trains these networks until their compute equals the compute of
    /// growing: the comparison at equal compute. Compute includes training and counterfactual
    /// evaluations.
    ///
    /// A policy from a file does not learn: ppo:FILE samples the policy's actions, greedy:FILE
    /// takes the most probable ones. ppo and ppo@REWARD first train a new policy for each seed, in
    /// --rounds rounds on other hosts.
    ///
    /// Seeds count up from --seed, which is 1000 by default. The default of `train` is 42, so
    /// policies are compared on hosts outside their training. A policy file lists the seeds of its
    /// training; a comparison on one of these seeds prints a warning.
    ///
    /// --policy and --run-dir have other meanings in `train`: the initial policy of the run, and
    /// the folder of a single run.
    Eval(Box<ControlEvalArguments>),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ControlEvalArguments {
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Comparison")]
    #[arg(help = format!(
        "Controllers to compare: {}; differences are from the first [default: \
         none,random,heuristic]",
        listed(Contender::FORMS)
    ))]
    controllers: Vec<Contender>,
    /// One more policy to compare, as ppo:FILE in --controllers; may be given several times
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    policy: Vec<PathBuf>,
    /// Number of seeds, which count up from --seed
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Comparison")]
    pub(crate) seeds: usize,
    /// File for a plot of the score against parameters and compute, .svg or .png; must not exist
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    pub(crate) plot: Option<PlotFile>,
    /// Folder that keeps all runs of the comparison and study.json; must not exist [default:
    /// runs are deleted]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Print no progress
    #[arg(long, help_heading = "Run")]
    pub(crate) quiet: bool,
    /// Print the comparison as JSON instead of a table
    #[arg(long, help_heading = "Run")]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) settings: SettingArguments<false>,
}

impl ControlEvalArguments {
    /// Returns the contenders: --controllers, then the files of --policy.
    pub(crate) fn contenders(&self) -> Vec<Contender> {
        let mut contenders = self.controllers.clone();
        if contenders.is_empty() {
            let defaults =
                [ControllerKind::None, ControllerKind::Random, ControllerKind::Heuristic];
            contenders.extend(defaults.map(Contender::Controller));
        }
        let policy = |path: &PathBuf| Contender::Controller(ControllerKind::Policy(path.clone()));
        contenders.extend(self.policy.iter().map(policy));
        contenders
    }
}
