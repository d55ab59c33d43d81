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
    /// Train a policy for any host on many cheap tasks.
    ///
    /// The file has the number of rounds, settings of all runs, and two spaces. In each round a
    /// dataset with its difficulty is drawn from the table [task], and the settings of each env,
    /// such as host and learning rate, from the table [members]. The policy acts for one episode,
    /// and learns from all envs. Before the first round, at intervals and at the end it is
    /// evaluated on tasks that no round has, beside the heuristic and random actions.
    ///
    /// The folder gets the policy, which `train --controller ppo --policy` and ppo:FILE accept,
    /// the curves as JSON lines and as a plot, and after each round the state. After Ctrl-C or a
    /// kill the same command continues, to the same bits. More rounds extend it.
    TrainPolicy(TrainPolicyArguments),
}

#[derive(Debug, Args)]
pub(crate) struct TrainPolicyArguments {
    /// TOML or JSON file with the rounds, settings and spaces
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Number of rounds, in place of that of the file
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<usize>,
    /// Folder for policy, curves and state; must not exist, unless it is of an earlier training
    /// with this file, which then continues [default: policy-NAME, with the name of the file]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print no progress
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Print the last evaluation as JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

impl TrainPolicyArguments {
    /// The folder of the training.
    pub(crate) fn folder(&self) -> PathBuf {
        let stem = || self.file.file_stem().unwrap_or_default().to_string_lossy();
        self.run_dir.clone().unwrap_or_else(|| format!("policy-{}", stem()).into())
    }
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
