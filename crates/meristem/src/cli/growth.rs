//! Arguments of `meristem growth`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use meristem::train::config::ConfigLayer;
use meristem::train::config_file;
use meristem::train::growth_bench::{GrowthBench, METHODS, SUITES, TASKS};

use crate::plain::listed;

#[derive(Debug, Subcommand)]
pub(crate) enum GrowthCommand {
    /// Compare networks that grow with networks that do not: methods × tasks, in one table.
    ///
    /// For each task and method, the learning rate is chosen among four on tuning seeds, by the
    /// control split only. Then the seeds of the table are trained with it. The folder gets the
    /// table in growth.json and as Markdown, and a plot for each task: test score against
    /// parameters, training compute and seconds. Differences are paired by seed, intervals are 95
    /// %.
    ///
    /// After Ctrl-C or a kill the same command continues, with the same results: complete runs are
    /// not repeated. More methods and seeds may be given then.
    #[command(after_help = methods())]
    Bench(Box<GrowthBenchArguments>),
}

/// Meanings of the methods.
fn methods() -> String {
    let lines = METHODS.iter().map(|method| format!("  {:15} {}", method.name, method.meaning));
    let suites = SUITES.iter().map(|suite| {
        let tasks = suite.tasks.join(", ");
        format!("  {:15} {}: {tasks}; {} seeds", suite.name, suite.meaning, suite.seeds)
    });
    let [methods, suites] = [lines.collect::<Vec<_>>(), suites.collect()].map(|all| all.join("\n"));
    format!("Methods:\n{methods}\n\nSuites:\n{suites}")
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct GrowthBenchArguments {
    #[arg(long, value_name = "NAME", default_value = "small")]
    #[arg(help = format!("Tasks and their sizes: {}", listed(SUITES.each_ref().map(|s| s.name))))]
    suite: String,
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(help = format!(
        "Tasks of the suite to run: {} [default: all]",
        listed(TASKS.each_ref().map(|task| task.name))
    ))]
    tasks: Vec<String>,
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(help = format!(
        "Methods to compare, with those that they need: {} [default: all]",
        listed(METHODS.each_ref().map(|method| method.name))
    ))]
    methods: Vec<String>,
    /// Number of seeds of the table [default: the suite's]
    #[arg(long, value_name = "N")]
    seeds: Option<usize>,
    /// Number of seeds on which learning rates are chosen [default: the suite's]
    #[arg(long, value_name = "N")]
    tuning_seeds: Option<usize>,
    /// Learning rates to choose from, in increasing order; with a single one nothing is chosen
    /// [default: 0.03, 0.1, 0.3 and 1 with SGD; .3, 1, 3 and 10 times the default of other
    /// optimisers]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    rates: Vec<f32>,
    /// Folder of CIFAR-10, for the suite full
    #[arg(long, value_name = "DIR")]
    data_root: Option<PathBuf>,
    /// Worker threads; 0 means one per core
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Any other setting of train for all runs, such as --set optimizer=adamw --set steps=60; may
    /// be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Folder for runs and results; must not exist, unless it is of an earlier bench of the suite,
    /// which then continues [default: growth-SUITE]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print no progress
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Print the results as JSON instead of Markdown
    #[arg(long)]
    pub(crate) json: bool,
}

impl GrowthBenchArguments {
    /// The request.
    ///
    /// # Errors
    /// A value of --set that is no setting, with the reason.
    pub(crate) fn request(&self) -> Result<GrowthBench, meristem::train::Error> {
        let refused = |got: &str, expected: &dyn ToString| {
            meristem::train::Error::value("set", got, expected.to_string())
        };
        let mut settings = ConfigLayer::default();
        for text in &self.set {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| refused(text, &"KEY=VALUE, such as optimizer=adamw"))?;
            let (key, value) = (key.trim().replace('-', "_"), value.trim());
            config_file::check_keys([key.as_str()].into_iter())
                .map_err(|problem| refused(text, &format!("a setting of train: {problem}")))?;
            settings.set(&key, value).map_err(|error| refused(text, &error))?;
        }
        settings.threads = self.threads.or(settings.threads);
        settings.data_root = self.data_root.clone().map(Some).or(settings.data_root);
        let folder = || format!("growth-{}", self.suite).into();
        Ok(GrowthBench {
            suite: self.suite.clone(),
            tasks: self.tasks.clone(),
            methods: self.methods.clone(),
            seeds: self.seeds,
            tuning_seeds: self.tuning_seeds,
            rates: self.rates.clone(),
            settings,
            folder: self.run_dir.clone().unwrap_or_else(folder),
        })
    }
}
