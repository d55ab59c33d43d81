//! All settings. Each is declared here and nowhere else: its help (the doc comment), key, type and
//! default, then unit, range, scope and the version that introduced it.
//!
//! Flags, keys in files, validation, `--help`, the identity of a run, the upgrade of older run
//! folders and `docs/settings.md` follow from this table.

use std::path::PathBuf;
use std::sync::LazyLock;

use meristem_control::{
    GovernorConfig, HeadKind, HeuristicConfig, KeepRule, PpoConfig, RewardConfig, RewardMode,
    WidenPlace, WidenTrigger,
};
use meristem_data::MissingValues;
use meristem_data::order::EpochMode;
use meristem_grow::{Birth, Rules, Tempo};
use meristem_nn::Precision;
use meristem_nn::graph::WidthInit;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};

use super::declare::{
    Defaults, Setting, SettingScope, absent, absent_by_preset, place, presets, same, settings,
};
use super::default_values::{
    CLIP_NORM, COMM_DEADLINE, CONTROL_SHARE, FIRST_STUDY_SEED, RANKS_MAX, SMALL_HOST,
    STATISTICS_BATCHES, WHOLE_MAX, optimizer_default, policy_width, short,
};
use super::types::{
    Augmentations, BadValue, BatchLimit, BlueprintSource, ByteSize, ClassWeights, ClipNorm,
    CommKind, ControllerKind, ExchangeKind, GrowthLr, GrowthMomentum, HotScopePolicy, LossKind,
    LrSchedule, Members, ModuleLr, Normalize, Numbers, ObservationForm, OptimizerKind, ParamGroups,
    PlannedChanges, PolicyStart, Preset, Sampler, Scheduler, Space, Switch, TaskKind, Telemetry,
    unknown,
};
use super::value::SettingValue;

settings! {
    groups {
        /// Limits of growth, and gates of the lifecycle.
        rules: Rules = presets(short(0.5), short(0.0), Rules::default());
        /// Rules of the heuristic, except `plateau_gain_pp`, which has another type here, and
        /// `max_parameters`, which depends on the dataset.
        heuristic: HeuristicConfig = same(HeuristicConfig::default());
        /// Settings of PPO, except `hidden` and `bootstrap`, which depend on other settings.
        ppo: PpoConfig = same(PpoConfig::default());
        /// Weights of the reward, except `gamma`, which is `ppo.gamma`.
        reward: RewardConfig = same(RewardConfig::default());
        /// Rules of the governor.
        governor: GovernorConfig = same(GovernorConfig::default());
    }
    "Run" {
        /// Set of defaults for the other settings.
        preset: Preset = same(Preset::Default), of_learner();
        /// Last part of the default run folder's name.
        name: Option<String> = absent("host and dataset"),
            scope(SettingScope::Run), train_only();
        /// Run folder; must not exist. In control eval, --run-dir is the folder of a comparison.
        run_dir: Option<PathBuf> = absent("runs/<time>-<name>"),
            unit("DIR"), scope(SettingScope::Process), train_only();
        /// Seed of all random numbers of the run. The seed of a member applies to its initial
        /// weights, order of samples, augmentation and controller random; parts of the data depend
        /// on the run's seed.
        seed: u64 = same(42u64),
            whole(0, WHOLE_MAX), study_default(FIRST_STUDY_SEED), of_member(), of_learner();
        /// Number of rounds. In a round every env runs one episode with a fresh host; a policy
        /// learns at the end of each round. On resume more rounds extend the run.
        rounds: usize = presets(3, 2, 20).without_learning(1, 1, 1),
            unit("N"), whole(1, 1_000_000), extends();
        /// Steps per episode. A step is one epoch of host training (see --epoch), followed by one
        /// action per env. On resume more steps extend a run in its first round.
        steps: usize = presets(15, 10, 60).without_learning(30, 18, 60),
            unit("N"), whole(1, 1_000_000), extends(), of_learner();
        /// Steps between checkpoints; there is also one after the first step of the run. With 0
        /// checkpoints are written only between rounds and when the run is stopped.
        checkpoint_every: usize = same(10usize),
            unit("N"), whole(0, 1_000_000), scope(SettingScope::Run), train_only();
        /// Reaction to a copy, a wait or an allocation while batches are trained, from the second
        /// step on: off counts it, warn also logs it, deny ends the run.
        hot_scope: HotScopePolicy = same(HotScopePolicy::default()),
            unit("POLICY"), scope(SettingScope::Process), on_resume();
        /// Stop at the boundary after this many steps, counted over all rounds, as after Ctrl-C:
        /// with a checkpoint, from which the run can be resumed.
        stop_after: Option<usize> = absent("the last step"),
            unit("STEPS"), whole(1, 1_000_000), scope(SettingScope::Process), since(11, None),
            train_only(), on_resume();
        /// Write the loss of every batch of every env to the events.
        log_batches: bool = same(false), scope(SettingScope::Run), train_only();
        /// Times and gradient statistics in the events: off, basic, or full, which adds the time of
        /// each phase of a step and the gradients of every parameter group.
        telemetry: Telemetry = same(Telemetry::default()),
            unit("LEVEL"), scope(SettingScope::Run), since(2, "basic"), train_only();
        /// Every Nth step has gradient statistics in the events, counted from the first step of a
        /// round.
        gradient_stats_every: usize = same(1usize),
            unit("N"), whole(1, 1_000_000), scope(SettingScope::Run), since(2, "1"), train_only();
        /// Every Nth step has times in the events, counted from the first step of a round.
        time_every: usize = same(1usize),
            unit("N"), whole(1, 1_000_000), scope(SettingScope::Run), since(2, "1"), train_only();
        /// File to write a trace of the run to, for ui.perfetto.dev or chrome://tracing; must not
        /// exist.
        trace: Option<PathBuf> = absent("no trace"),
            unit("FILE"), scope(SettingScope::Process), train_only(), on_resume();
        /// Write TensorBoard event files to the folder tensorboard of the run during training.
        /// Results do not depend on it.
        tensorboard: bool = same(false),
            scope(SettingScope::Process), since(5, "false"), train_only(), on_resume();
    }
    "Data" {
        /// Dataset: embedded, fashion-mnist, cifar10, cifar100, folder, csv, arrays, table,
        /// mnist1d, blobs, spirals or friedman.
        dataset: String = same("embedded");
        /// Folder of the dataset; with --dataset csv, arrays or table, the file.
        data_root: Option<PathBuf> = absent("none, for a dataset without files"),
            unit("DIR");
        /// Target columns, with --dataset table; all other columns are features. One column of text
        /// or of whole numbers has classes, other columns have numbers. With --task regress a
        /// column of whole numbers has numbers, too.
        target: Option<Vec<String>> = absent("none, for datasets other than table"),
            unit("COLUMNS"), since(9, None);
        /// Missing values of features, with --dataset table. refuse: an error. fill: in a column of
        /// numbers the mean of the training rows, in a column of categories one more category.
        missing: MissingValues = same(MissingValues::Refuse),
            unit("RULE"), since(9, "refuse");
        /// Skip and count images that do not decode and CIFAR records with an invalid label,
        /// instead of stopping.
        skip_bad: bool = same(false);
        /// Rows and columns of all images, with --dataset folder or csv: images of other sizes are
        /// cut to their central square and scaled, with an antialiasing filter.
        resize: Option<usize> = absent("images keep their size, which must be the same"),
            unit("N"), whole(1, 4096), since(6, None);
        /// Decode image files without reading or writing the cache of decoded images.
        no_cache: bool = same(false), scope(SettingScope::Process), since(6, "false"), on_resume();
        /// Device memory that one split of the dataset may take, such as 64MiB. A larger split is
        /// streamed, with the same results.
        data_budget: Option<ByteSize> = absent("no limit"),
            unit("SIZE"), whole(1, u64::MAX), scope(SettingScope::Run);
        /// Share of the training set held out as the control split. Hosts never train on it;
        /// controllers and rewards use the score on it.
        control_split: Option<f64> =
            absent(format!("{CONTROL_SHARE} with a controller, 0 without one")),
            unit("SHARE"), real(0.0, 0.9), study_default(CONTROL_SHARE);
        /// Folds of a cross-validation: env i holds out fold i mod N as its control split, with M
        /// members fold ⌊i / M⌋ mod N, and trains on the others. Classes are spread evenly over the
        /// folds. envs must be a multiple of N, or with M members a multiple of M · N; the default
        /// of envs is N, or M · N.
        folds: Option<usize> = absent("one control split for all envs"),
            unit("N"), whole(2, 4096), since(10, None), train_only();
        /// Train each env on a bootstrap sample of its training samples: drawn with replacement, as
        /// many as it has, times train-share.
        bootstrap: bool = same(false), since(10, "false"), train_only(), of_member();
        /// Share of its training samples that each env trains on, drawn for each env.
        train_share: f64 = same(1.0f64),
            unit("SHARE"), real(1e-6, 1.0), since(10, "1"), train_only(), of_member();
        /// Classes, by name or number, to which training, control and test samples are restricted.
        /// Classes keep their numbers, and networks their outputs.
        classes: Option<Vec<String>> = absent("all classes"),
            unit("LIST"), since(10, None), train_only();
        /// Shuffle the training set every epoch; off keeps the order of the files.
        shuffle: Switch = same(Switch(true)), unit("on|off");
        /// Mean and standard deviation that normalise each channel, for pixels in 0..1. data:
        /// computed from the training images. cifar10, imagenet: published constants. Or numbers,
        /// such as 'mean=0.5,0.5,0.5;std=0.25,0.25,0.25'.
        normalize: Normalize = same(Normalize::default()), unit("CONSTANTS"), since(5, "data");
        /// Augmentations of training images: none, or any of crop,flip,cutout.
        augment: Augmentations = same(Augmentations::default()), unit("LIST"), of_member();
        /// Training images of an env in a step. full: every env trains on all images, in a separate
        /// order. dealt: the images are divided among the envs of a device, so each of N envs
        /// trains on 1/N.
        epoch: EpochMode = presets(EpochMode::Full, EpochMode::Dealt, EpochMode::Full),
            since(4, "dealt");
        /// Samples in a batch of one env; with --data-parallel, of all ranks together.
        batch: usize = same(128usize), unit("N"), whole(1, 65_536), of_member(), of_learner();
        /// Maximum number of batches per env and step, or all.
        max_batches: BatchLimit = same(BatchLimit::All), unit("N"), whole(1, 1_000_000_000);
    }
    "Hosts" {
        /// Host: baseline, wide, deep, large, impaired, minimal, resnet8, resnet20, vgg8 or mobile;
        /// a description such as cnn:channels=12,blocks=4,kernel=5,pools=3, mlp:256,256 or
        /// conv1d:16,32,64; or a TOML or JSON file that describes one.
        host: String = presets(SMALL_HOST.into(), SMALL_HOST.into(), "baseline".into()),
            of_member(), of_learner();
        /// Number of hosts trained side by side; 1 with --data-parallel.
        envs: usize = same(4usize), unit("N"), whole(1, 4096), of_learner();
        /// Settings that differ from env to env, once for each setting: --members lr=0.1,0.03
        /// --members host=baseline,wide trains the four combinations. Env i has the
        /// settings of member i; with more envs than members the members are repeated in order.
        /// Without --envs there is one env for each member.
        members: Option<Members> = absent("all envs have the settings of the run"),
            unit("KEY=VALUES"), since(10, None), train_only();
        /// Distributions of members' settings, once for each setting: --space
        /// lr=log_uniform:0.001,1 --space host=choice:baseline|wide. `samples` members are drawn
        /// from it; scheduler pbt changes settings within it.
        space: Option<Space> = absent("no members are drawn"),
            unit("KEY=DISTRIBUTION"), since(11, None), train_only();
        /// Number of members that are drawn from the space when the run begins.
        samples: Option<usize> = absent("members as given"),
            unit("N"), whole(1, 4096), since(11, None), train_only();
        /// Method of drawing members from the space: random, or sobol, a sequence that covers the
        /// space evenly. external: the Python or Rust program that trains them chooses the
        /// settings of each member when it begins, and needs no space.
        sampler: Sampler = same(Sampler::Random), since(11, "random"), train_only();
        /// Rule by which members end early or copy each other, by their control scores. halving:R:
        /// at steps S/R, S/R², … of S, one of R members goes on. hyperband:R: several such
        /// brackets. median:N: from step N on, members end whose best score is below the median of
        /// the others' means. patience:N: members end after N steps without a better score. pbt:N:
        /// every N steps the worst fifth copies the best fifth and changes the settings.
        scheduler: Scheduler = same(Scheduler::None),
            unit("RULE"), since(11, "none"), train_only();
        /// Number of members in training at a time. When a member ends, the next one begins in its
        /// place, so that all workers stay in use. Each member makes `steps` steps. With halving
        /// and hyperband, members are compared at steps called rungs: a member goes on if it is
        /// among the best of those that have reached the rung so far.
        places: Option<usize> = absent("all members"),
            unit("N"), whole(1, 4096), since(12, None), train_only();
        /// Changes of members after some steps, instead of the decisions of a scheduler. `sweep
        /// replay` writes them to train a member of a population again.
        member_changes: Option<PlannedChanges> = absent("none, or those of the scheduler"),
            unit("JSON"), since(11, None), train_only();
        /// Members that end when the run is resumed, such as 3,8. Only with --resume.
        end_members: Option<Numbers> = absent("none"),
            unit("LIST"), scope(SettingScope::Process), since(11, None), train_only(), on_resume();
        /// Numbers of the envs, such as 5,17. Random numbers depend on them: with epoch full, an
        /// env has the same bits as the env with this number in a run of more envs.
        env_numbers: Option<Numbers> = absent("0, 1 and so on"),
            unit("LIST"), since(11, None), train_only();
        /// Weights file that every env starts from: safetensors with PyTorch's names.
        init: Option<PathBuf> = absent("random weights"), unit("FILE"), of_member(), of_learner();
        /// Weights file of any run; every env starts from the topology of this file. Modules of the
        /// topology are permanent from the beginning; host and modules have random weights. With a
        /// run folder, each env starts from the topology of that run's env with the same number.
        start_topology: Option<PathBuf> = absent("no modules"), unit("PATH"), since(5, None),
            of_learner();
        /// Train a bare twin of every env for comparison: the same host without growth, with the
        /// same initial weights, on the same batches.
        twin: Option<Switch> = absent("on with a controller, except with --data-parallel"),
            unit("on|off"), since(5, "off"), train_only();
        /// File for a copy of the weights of the best env: best by control score after the last
        /// round, or env 0 without a control split. Must not exist.
        export: Option<PathBuf> = absent("no additional file"),
            unit("FILE"), scope(SettingScope::Process), train_only();
        /// Optimiser of hosts and modules: sgd; nesterov, with Nesterov's momentum; adam; adamw,
        /// with decoupled weight decay; lion; or muon for matrices and kernels of convolutions,
        /// with adamw for other parameters.
        optimizer: OptimizerKind = same(OptimizerKind::Sgd), since(11, "sgd"), of_member(),
            of_learner();
        /// Learning rate of the host, and of its modules, see module-lr.
        lr: Option<f32> = absent(optimizer_default("lr")),
            unit("RATE"), real(0.0, 1e6), of_member(), of_learner();
        /// Learning rate and momentum of modules with optimizer sgd or nesterov. host: as the host.
        /// fixed: 0.01 and 0.9, whatever the host has. With other optimisers modules always have
        /// the hyperparameters of the host.
        module_lr: ModuleLr = same(ModuleLr::default()), unit("RULE"), since(16, "fixed"),
            of_member(), of_learner();
        /// Schedule of the learning rates of hosts and modules over an episode: constant, cosine or
        /// one-cycle. A module that germinates late joins the schedule at the current step.
        lr_schedule: LrSchedule = same(LrSchedule::default()),
            unit("NAME"), since(5, "constant"), of_member(), of_learner();
        /// Steps over which the learning rates rise to their schedule. With 0 there is no warm-up,
        /// and one-cycle rises over 30 % of the steps.
        lr_warmup: usize = same(0usize), unit("N"), whole(0, 1_000_000), since(5, "0"), of_member(),
            of_learner();
        /// Training batches, the same in every step, that recompute the running statistics of batch
        /// norm before every evaluation, with fixed weights. With 0 the averages from training are
        /// used, except with --data-parallel and an exchange other than dense.
        statistics_batches: usize = same(STATISTICS_BATCHES),
            unit("N"), whole(0, 1_000_000), since(5, "0");
        /// Momentum of the host and of its modules, with optimizer sgd, nesterov or muon; see
        /// module-lr.
        momentum: Option<f32> = absent(optimizer_default("momentum")),
            unit("M"), real(0.0, 0.999_999), of_member(), of_learner();
        /// Weight decay of the host; modules have none. sgd, nesterov and adam add it to the
        /// gradient, the others multiply the parameter by 1 - lr * weight-decay.
        weight_decay: Option<f32> = absent(optimizer_default("weight-decay")),
            unit("W"), real(0.0, 1e6), of_member(), of_learner();
        /// Decay of the average of the gradient, with optimizer adam, adamw or muon; weight of the
        /// average in the step's direction, with lion.
        beta1: Option<f64> = absent(optimizer_default("beta1")),
            unit("B"), real(0.0, 0.999_999), since(11, None), of_member(), of_learner();
        /// Decay of the average of the gradient's square, with optimizer adam, adamw or muon; of
        /// the gradient's average, with lion.
        beta2: Option<f64> = absent(optimizer_default("beta2")),
            unit("B"), real(0.0, 0.999_999_9), since(11, None), of_member(), of_learner();
        /// Number that is added to the root of the average square, with optimizer adam, adamw or
        /// muon.
        eps: Option<f32> = absent(optimizer_default("eps")),
            unit("EPS"), real(1e-30, 1.0), since(11, None), of_member(), of_learner();
        /// Learning rate of the parameters that are not matrices, with optimizer muon.
        adam_lr: Option<f32> = absent(optimizer_default("adam-lr")),
            unit("RATE"), real(0.0, 1e6), since(11, None), of_member(), of_learner();
        /// Learning rate and weight decay of parameters by name: '*.bias: weight_decay=0;
        /// classifier.*: lr=0.1x'. * stands for any text; 0.1x is a tenth of the value that the
        /// parameter would have. The first pattern that matches a parameter applies.
        param_groups: Option<ParamGroups> = absent("none"),
            unit("GROUPS"), since(11, None), of_member(), of_learner();
        /// Maximum gradient norm of the host and of each module; a longer gradient is scaled down.
        /// off: no clipping.
        clip_norm: ClipNorm = same(ClipNorm::at(CLIP_NORM)), unit("NORM"), of_member(),
            of_learner();
        /// Task: auto, classify, multilabel or regress. auto: classify for classes, multilabel for
        /// several labels, regress for numbers. Its score is the accuracy, micro-F1 or R².
        task: TaskKind = same(TaskKind::Auto), unit("TASK"), since(9, "auto"), of_learner();
        /// Loss: cross-entropy for task classify, binary-cross-entropy for multilabel; mse, huber
        /// or l1 for regress, whose targets are standardised. auto: the first of these. external: a
        /// function of the program, from Python or Rust.
        loss: LossKind = same(LossKind::Auto), unit("LOSS"), since(9, "auto");
        /// Difference at which the Huber loss becomes linear, in standard deviations of the
        /// targets.
        huber_delta: f32 = same(1.0f32), unit("D"), real(1e-6, 1e6), since(9, "1");
        /// Share of each label that is spread evenly over all classes.
        label_smoothing: f32 = same(0.0f32), unit("S"), real(0.0, 1.0), since(8, "0"), of_member();
        /// Probability of dropout in all dropout layers of the host, instead of their own.
        dropout: Option<f32> = absent("the probabilities of the host"),
            unit("P"), real(0.0, 0.999_999), since(14, None), of_member(), of_learner();
        /// Weights of the classes in the loss: none, balanced, which gives every class the same
        /// share, or one number for each class.
        class_weights: ClassWeights = same(ClassWeights::None),
            unit("WEIGHTS"), since(8, "none");
    }
    "Devices" {
        /// Devices, such as cpu:0,cpu:1, each listed once. Envs are distributed over them in order
        /// and evenly; each device has its own memory, workers and order of samples. With
        /// data_parallel and ranks that are threads, the ranks are distributed, with the order of
        /// samples of the first device. GPUs, such as cuda:0, need a build with the feature cuda.
        /// On resume cpu:N may become cuda:N or the reverse; from there on the results differ by
        /// rounding.
        devices: Vec<String> = same(["cpu".to_string()]), unit("LIST"), on_resume(), of_learner();
        /// Precision of hosts and modules, in training and evaluation: f32, tf32 or bf16. tf32
        /// rounds the factors of products in convolutions and linear layers. bf16 stores
        /// activations and their gradients in 16 bits, of the policy as well, and multiplies
        /// factors of bf16. Sums, weights, statistics, losses and optimisers are f32. All devices
        /// must be CUDA devices, except with f32. The precision may change on resume; from there on
        /// the results differ.
        precision: Precision = same(Precision::default()), since(5, "f32"), on_resume(),
            of_learner();
        /// Winograd's minimal filtering for 3×3 convolutions whose channels are multiples of 8, on
        /// CPUs: fewer multiplications, larger rounding errors. off: direct convolution.
        winograd: Switch = same(Switch(true)), unit("on|off"), since(7, "off"), of_learner();
        /// Device of the policy, one of --devices. With --ranks a list, over which the policies of
        /// the ranks are distributed.
        policy_device: Option<String> = absent("the first device"),
            unit("DEVICE"), scope(SettingScope::Process), on_resume();
        /// Memory limit of each device, such as 64MiB.
        device_memory: Option<ByteSize> = absent("no limit"),
            unit("SIZE"), whole(1, u64::MAX), scope(SettingScope::Process), on_resume(),
            of_learner();
        /// Worker threads of each device; 0 means one per core.
        threads: usize = same(0usize),
            unit("N"), whole(0, 1024), scope(SettingScope::Process), on_resume(), of_learner();
    }
    "Growth" {
        /// Controller that decides what grows. heuristic: rules. ppo: a policy that learns from
        /// round to round. ppo:FILE, greedy:FILE: a fixed policy that samples its actions, or takes
        /// the most probable ones; FILE may be general or shipped, see policy. random: any legal
        /// action. fixed:FILE: a script of actions. none: nothing grows. Members may have different
        /// ones, but no policies.
        controller: ControllerKind = same(ControllerKind::default()), train_only(), of_member();
        /// Slots that may grow: names (r0c1), prefixes of names (r0, r1), or all.
        slots: Option<Vec<String>> = absent("r0 if the host has such slots, else all"),
            unit("LIST"), of_member(), of_learner();
        /// Blueprints of the modules that may grow: standard, the seven that come with the program,
        /// vectors, two for hosts such as mlp:64,64, or TOML or JSON files of blueprints, in the
        /// order of the list.
        blueprints: Option<Vec<BlueprintSource>> = absent("standard"),
            unit("LIST"), since(7, None), of_learner();
        /// Maximum number of modules in an env at once, including fossilized ones.
        max_modules in rules.max_modules: usize, unit("N"), whole(0, 64), of_member(),
            of_growth(), of_learner();
        /// Maximum number of parameters of a host with its modules, each with a gate (style
        /// linear_gate). An action that would exceed it is illegal, for every controller.
        max_parameters in rules.max_parameters: Option<u64>, unit("N"), whole(1, WHOLE_MAX),
            since(5, None), absent("no limit"), of_member(), of_growth(), of_learner();
        /// Maximum number of multiply-accumulate operations per image of a host with its modules,
        /// in evaluation. An action that would exceed it is illegal, for every controller.
        max_macs in rules.max_macs: Option<u64>, unit("N"), whole(1, WHOLE_MAX),
            since(5, None), absent("no limit"), of_member(), of_growth(), of_learner();
        /// Place of a new module in the network. aside: it learns beside the host, and is then
        /// blended in with a detached input. joint: it is part of the host from its first step, as
        /// the identity, and both learn together.
        birth in rules.birth: Birth, since(16, "aside"), of_member(), of_growth(), of_learner();
        /// Initial parameters of further features of a layer. zero: as in a new layer, with
        /// outgoing weights of 0. net2wider: copies of other features, with shares of their
        /// outgoing weights. firefly: as zero, but the best of eight times as many candidates.
        /// gradmax: incoming weights of 0, with the outgoing weights that give them the largest
        /// gradient. tiny: the features that lower the loss most. variance_transfer: pairs of equal
        /// features with opposite outgoing weights, and smaller old weights before a batch norm.
        /// firefly, gradmax and tiny measure 16 training batches.
        width_init in rules.width_init: WidthInit, since(13, "zero"), of_member(),
            of_growth(), of_width(), of_learner();
        /// Learning rates of new parts. uniform: those of old parts. FACTOR:STEPS, such as 2:10 or
        /// 0.1:5: features that a layer gets and modules begin with FACTOR times the rate, which
        /// goes linearly to the usual one over STEPS steps. norm: elements W_t that a parameter got
        /// later have ‖W_t‖ / ‖W_0‖ times the rate, where W_0 are the elements that it began with;
        /// at least 0.1 and at most 10 times.
        growth_lr: GrowthLr = same(GrowthLr::Uniform),
            unit("RATES"), since(15, "uniform"), of_member(), of_growth();
        /// State of an env's optimisers when a layer becomes wider. keep: it stays with its
        /// parameters. reset: all of it becomes 0.
        growth_momentum: GrowthMomentum = same(GrowthMomentum::Keep),
            unit("STATE"), since(15, "keep"), of_member(), of_growth(), of_width();
        /// Minimum number of steps in stage training before a module may blend.
        min_training_steps in rules.gates.min_training_steps: u32,
            unit("N"), whole(1, 1_000_000), of_member(), of_growth(), of_learner();
        /// Minimum contribution of a module to be fossilized, in percentage points of control
        /// score.
        min_contribution in rules.gates.min_contribution_pp: f64,
            unit("PP"), real(-100.0, 100.0), of_member(), of_growth(), of_learner();
        /// Number of steps without a significant gain above plateau-gain after which the heuristic
        /// grows a module. With 0 it does not wait for a plateau.
        plateau_steps in heuristic.plateau_steps: usize, unit("N"), whole(0, 1_000_000),
            of_member(), of_heuristic();
        /// Gain of control score per step that ends a plateau, in percentage points.
        plateau_gain: f64 = same(HeuristicConfig::default().plateau_gain_pp),
            unit("PP"), real(-100.0, 100.0), of_member(), of_heuristic();
        /// Maximum number of parameters per training image, modules included, to which the
        /// heuristic grows a host.
        parameters_per_image: f64 = same(1.0), unit("N"), real(0.0, 1e9), since(5, "1"),
            of_member(), of_heuristic();
        /// Maximum relative excess of the control loss over the training loss with which the
        /// heuristic still grows a host.
        max_gap in heuristic.max_gap: f64, unit("SHARE"), real(0.0, 1e9),
            since(5, "0.25"), of_member(), of_heuristic();
        /// Duration of blending that the heuristic chooses: fast (3 steps), standard (5) or slow
        /// (8).
        tempo in heuristic.tempo: Tempo, of_member(), of_heuristic();
        /// Share of its initial features by which the heuristic, or a policy of the form set-widen,
        /// makes a layer wider. The heuristic does so for one layer at a time, while no module
        /// needs an action. With 0 no layer becomes wider.
        widen_by in heuristic.widen_by: f64, unit("SHARE"), real(0.0, 100.0),
            since(13, "0"), of_member(), of_heuristic();
        /// Minimum number of steps from one change of width in an env to the next.
        widen_pause in heuristic.widen_pause: u32, unit("N"), whole(1, 1_000_000),
            since(13, "3"), of_member(), of_heuristic(), of_width();
        /// Largest number of features of a layer that the heuristic or a policy widens, as a
        /// multiple of its initial number; at least 1 + widen-by.
        widen_up_to in heuristic.widen_up_to: f64, unit("FACTOR"), real(1.0, 1000.0),
            since(13, "2"), of_member(), of_heuristic(), of_width();
        /// Trigger of the heuristic's growth in width, besides the end of the pause. schedule: no
        /// other condition. plateau: the control score is on a plateau, by plateau-steps and
        /// plateau-gain. The others measure 16 training batches. orthogonality: the activations of
        /// the layer are as orthogonal as in the first step, by widen-orthogonality.
        /// gradient_ratio:X: the gradients that new features would get are more than X times as
        /// large as the present ones. natural_gradient:X: new features would lower the loss by more
        /// than X times as much as changes of the next layer's weights.
        widen_trigger in heuristic.widen_trigger: WidenTrigger,
            unit("RULE"), since(15, "schedule"), of_member(), of_heuristic(), of_width();
        /// Layer that the heuristic makes wider. smallest: the one whose number of features after
        /// the change is the smallest multiple of its initial number. The others measure 16
        /// training batches. orthogonality: the one whose activations are most orthogonal, compared
        /// with the first step. gradient_ratio, natural_gradient: the one with the largest score,
        /// see widen-trigger.
        widen_place in heuristic.widen_place: WidenPlace,
            unit("RULE"), since(15, "smallest"), of_member(), of_heuristic(), of_width();
        /// Share of the orthogonality in the first step that a layer must exceed, with
        /// widen-trigger orthogonality.
        widen_orthogonality in heuristic.widen_orthogonality: f64,
            unit("SHARE"), real(0.0, 1.0), since(15, "0.97"), of_member(),
            of_heuristic(), of_width();
        /// Modules that the heuristic makes permanent at the end of their trial. significant: those
        /// without which the control loss is higher by 2 standard errors. positive: those without
        /// which it is higher. all: every module. The gate, with min-contribution, must pass as
        /// well.
        keep_modules in heuristic.keep_modules: KeepRule,
            unit("RULE"), since(15, "significant"), of_member(), of_heuristic();
    }
    "Policy" {
        /// Initial policy of controller ppo. general: the policy of the program for any host, which
        /// learned from many tasks. shipped: the policy of the program for hosts with three slots
        /// and the standard blueprints, which imitates the heuristic. none: a new policy. Or a
        /// policy file. In control eval, --policy adds a policy to the comparison.
        policy: Option<PolicyStart> = absent(
            "shipped for three slots and the standard blueprints, else general; none with \
             policy-hidden, and if policy-form is set to a form that the policy does not have"
        ), unit("POLICY"), since(7, "none"), train_only();
        /// Width of the policy network.
        policy_hidden: Option<usize> = absent_by_preset(
            "the width of the policy that the run starts from; for a new policy",
            Preset::NAMES.map(|(_, preset)| policy_width(preset))
        ), unit("N"), whole(1, 65_536);
        /// Form of the policy. vector: for hosts with one number of slots and one list of
        /// blueprints. set: for any hosts, which may differ between members. set-widen: as set, and
        /// the policy may make layers wider, by widen-by and up to widen-up-to.
        policy_form: Option<ObservationForm> = absent(
            "the form of the policy that the run starts from; for a new policy vector"
        ), unit("FORM"), since(14, "vector");
        /// Rounds in which the heuristic acts and the policy learns to imitate it, before the
        /// policy acts and learns from rewards.
        ppo_demonstrations: usize = same(0usize),
            unit("ROUNDS"), whole(0, 1_000_000), since(7, "0");
        /// Passes over the round in one policy update.
        ppo_epochs in ppo.epochs: usize, unit("N"), whole(1, 1000);
        /// Parts into which the envs of a rank are divided in each pass. Each part is a minibatch
        /// of whole episodes, with one optimiser step, and normalises its advantages.
        ppo_minibatches in ppo.minibatches: usize, unit("N"), whole(1, 4096), since(15, "1");
        /// Learning rate of the policy (Adam).
        ppo_lr in ppo.lr: f32, unit("RATE"), real(0.0, f64::from(f32::MAX));
        /// ε of Adam.
        ppo_adam_eps in ppo.adam_eps: f32, unit("EPS"), real(1e-30, 1.0);
        /// Maximum norm of the policy's gradient; a longer gradient is scaled down.
        ppo_clip_norm in ppo.clip_norm: f32, unit("NORM"), real(1e-6, 1e6);
        /// Discount factor γ of rewards and of the stage potential.
        ppo_gamma in ppo.gamma: f64, unit("GAMMA"), real(0.0, 1.0);
        /// λ of generalised advantage estimation.
        ppo_lambda in ppo.lambda: f64, unit("LAMBDA"), real(0.0, 1.0);
        /// Whether the return of an episode is bootstrapped with the value of the observation after
        /// its last step. off: the episode ends as a termination.
        ppo_bootstrap: Option<Switch> = absent("on, and off with reward shaped"),
            unit("on|off"), since(5, "on");
        /// Clipping range ε of the probability ratio, which is clipped to 1 ± ε.
        ppo_clip in ppo.clip: f32, unit("EPS"), real(1e-6, 1.0);
        /// Weight of the value loss.
        ppo_value_weight in ppo.value_weight: f32, unit("W"), real(0.0, 1e6);
        /// Weight of the entropy bonus.
        ppo_entropy_weight in ppo.entropy_weight: f32, unit("W"), real(0.0, 1e6);
        /// Minimum of the normalised mean entropy of a head. The loss gets a penalty for a lower
        /// entropy, the square of the difference.
        ppo_entropy_floor in ppo.entropy_floor: f32, unit("H"), real(0.0, 1.0), since(15, "0.3");
        /// Target KL divergence of an update. An update stops early once the KL divergence is above
        /// 1.5 times the target.
        ppo_target_kl in ppo.target_kl: f64, unit("KL"), real(1e-9, 1e6);
        /// Lower bound of the standard deviation that advantages are divided by.
        ppo_advantage_std_floor in ppo.advantage_std_floor: f64,
            unit("STD"), real(1e-9, 1e6);
        /// Minimum probability of every legal op in the first round of learning.
        ppo_floor_op in ppo.floors[HeadKind::Op as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.15");
        /// Minimum probability of every legal slot in the first round of learning.
        ppo_floor_slot in ppo.floors[HeadKind::Slot as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.05");
        /// Minimum probability of every legal blueprint in the first round of learning.
        ppo_floor_blueprint in ppo.floors[HeadKind::Blueprint as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.12");
        /// Minimum probability of every legal blending style in the first round of learning.
        ppo_floor_style in ppo.floors[HeadKind::Style as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.08");
        /// Minimum probability of every legal tempo in the first round of learning.
        ppo_floor_tempo in ppo.floors[HeadKind::Tempo as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.12");
        /// Minimum probability of every legal target of alpha in the first round of learning.
        ppo_floor_alpha_target in ppo.floors[HeadKind::AlphaTarget as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.08");
        /// Minimum probability of every legal speed of alpha in the first round of learning.
        ppo_floor_alpha_speed in ppo.floors[HeadKind::AlphaSpeed as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.06");
        /// Minimum probability of every legal curve of alpha in the first round of learning.
        ppo_floor_alpha_curve in ppo.floors[HeadKind::AlphaCurve as usize]: f32,
            unit("P"), real(0.0, 0.99), since(5, "0.06");
        /// Rounds over which the ppo-floor settings fall to 0, linearly; with 0 they do not fall. A
        /// policy that does not learn has no floors.
        ppo_floor_rounds in ppo.floor_rounds: usize,
            unit("N"), whole(0, 1_000_000), since(5, "0");
        /// Consecutive updates with a non-finite loss or gradient after which the run ends.
        ppo_skips_max in ppo.skips_max: usize, unit("N"), whole(1, 1_000_000);
    }
    "Reward" {
        /// Reward of the policy: basic, contribution, sparse or shaped. The last needs twins.
        reward in reward.mode: RewardMode, of_learner();
        /// Reward per percentage point of control score gained in a step.
        reward_gain in reward.gain: f64, unit("W"), real(-1e6, 1e6), since(3, "0.2"), of_learner();
        /// Weight of a step's rent, ln(1 + E / max(H, 200)). E is the number of parameters of all
        /// modules, each weighted by its alpha, and of the features that layers got by widening; H
        /// is the number of parameters with which the host began.
        reward_rent in reward.rent: f64, unit("W"), real(-1e6, 1e6), since(3, "0.05"), of_learner();
        /// Maximum rent of a step.
        reward_rent_max in reward.rent_max: f64,
            unit("REWARD"), real(0.0, 1e6), since(3, "0.5");
        /// Weight of the stage potential. Only with reward contribution or shaped.
        reward_potential in reward.potential: f64,
            unit("W"), real(-1e6, 1e6), since(3, "0.1");
        /// Weight of the harmonic mean of contribution and gain when a good module is fossilized.
        /// Only with reward contribution.
        reward_fossilize in reward.fossilize: f64,
            unit("W"), real(-1e6, 1e6), since(3, "0.1");
        /// Cost of fossilizing any other module. Only with reward contribution.
        reward_fossilize_price in reward.fossilize_price: f64,
            unit("REWARD"), real(-1e6, 1e6), since(3, "0.5");
        /// Reward for pruning a harmful module. Only with reward contribution.
        reward_prune in reward.prune: f64, unit("REWARD"), real(-1e6, 1e6), since(3, "0.1");
        /// Cost of every action except WAIT. Only with reward contribution or shaped.
        reward_op_price in reward.op_price: f64,
            unit("REWARD"), real(-1e6, 1e6), since(3, "0.01");
        /// Weight of the size of all modules at the end, ln(1 + E / max(H, 200)), with E and H as
        /// in reward-rent. Only with reward sparse.
        reward_sparse_size in reward.sparse_size: f64,
            unit("W"), real(-1e6, 1e6), since(3, "0.1");
        /// Reward per nat of increase, in a step, of the twin's control loss minus the env's. Only
        /// with reward shaped.
        reward_advantage in reward.twin_lead: f64, unit("W"), real(-1e6, 1e6), since(5, "8");
        /// Cost of an increase of ln(1 + E / max(H, 200)) by 1, with E and H as in reward-rent.
        /// Only with reward shaped.
        reward_size in reward.size: f64, unit("W"), real(-1e6, 1e6), since(5, "0.1");
    }
    "Governor" {
        /// Relative distance from the loss of guessing within which a loss counts as guessing. The
        /// loss of guessing is the loss of the best constant prediction: with classes, ln(classes).
        governor_collapse_width in governor.collapse_distance: f64,
            unit("SHARE"), real(0.0, 1.0), since(2, "0.065");
        /// Share of the loss of guessing. Once the mean loss of an env falls below this share, the
        /// env counts as trained, and a later return to the loss of guessing counts as a failure.
        governor_learned_share in governor.learned_share: f64,
            unit("SHARE"), real(0.0, 1.0), since(2, "0.6");
        /// Minimum loss of a spike. A loss is a spike only if it exceeds all three spike limits.
        governor_spike_loss in governor.spike_loss: f64,
            unit("LOSS"), real(0.0, 1e9), since(2, "12");
        /// Minimum distance of a spike above the running mean, in standard deviations.
        governor_spike_sigmas in governor.spike_sigmas: f64,
            unit("N"), real(0.0, 1e9), since(2, "6");
        /// Minimum ratio of a spike's loss to the running mean.
        governor_spike_factor in governor.spike_factor: f64,
            unit("N"), real(0.0, 1e9), since(2, "3");
        /// Consecutive loss spikes that count as a failure.
        governor_spike_patience in governor.spike_patience: u32,
            unit("N"), whole(1, 1_000_000), since(2, "3");
        /// Steps between snapshots, from which failed envs are restored. An additional snapshot is
        /// taken whenever a module is fossilized or a layer gets wider.
        governor_snapshot_steps in governor.snapshot_steps: u32,
            unit("N"), whole(1, 1_000_000), since(2, "5"), of_learner();
        /// Failures of an env, without a snapshot in between, after which the run ends.
        governor_failures_max in governor.failures_max: u32,
            unit("N"), whole(1, 1_000_000), since(2, "3"), of_learner();
        /// Amount added to the reward of the action that caused a failure.
        governor_penalty in governor.penalty: f64,
            unit("REWARD"), real(-1e6, 0.0), since(2, "-10");
    }
    "Ranks" {
        /// Kind of ranks: threads of one process; mpi for the processes that mpirun started; nccl
        /// for processes with a GPU each that torchrun or mpirun started. mpi needs a build with
        /// --features mpi, nccl one with --features cuda.
        comm: CommKind = same(CommKind::default()),
            scope(SettingScope::Run), train_only(), on_resume();
        /// Number of ranks. With controller ppo each has an equal part of the envs, and all learn
        /// one policy; with --data-parallel all train one host.
        ranks: Option<usize> =
            absent("the number of processes with --comm mpi or nccl, otherwise 1"),
            unit("N"), whole(1, RANKS_MAX), train_only();
        /// Exchange of gradients between ranks: dense, int8 with eight bits for each element, or a
        /// sparse one, topk:D, gtopk:D, ok-topk:D or auto:D, where each rank sends the share D of
        /// its elements. diloco:H, with --data-parallel: each rank trains H batches on its own,
        /// then the ranks average the differences of their weights, dense or by a method after a
        /// second colon, such as diloco:32:int8.
        exchange: ExchangeKind = same(ExchangeKind::default()), train_only();
        /// Train one host on all ranks, each with its part of every batch; the ranks exchange
        /// gradients or, with exchange diloco:H, weights.
        data_parallel: bool = same(false), since(2, "false"), train_only();
        /// Seconds that ranks wait for each other; must exceed the duration of a step.
        comm_deadline: usize = same(COMM_DEADLINE),
            unit("SECONDS"), whole(1, 10_000_000), scope(SettingScope::Process), since(2, "600"),
            train_only(), on_resume();
    }
}

/// All settings, in the order of the reference page.
pub fn all() -> &'static [Setting] {
    &SETTINGS
}

/// The setting with the given key, one of [`ConfigLayer::KEYS`].
pub(crate) fn setting(key: &str) -> &'static Setting {
    let place = ConfigLayer::KEYS.iter().position(|known| *known == key);
    &SETTINGS[place.unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::super::declare::NumberRange;
    use super::*;

    /// Every number has a range of its kind.
    #[test]
    fn ranges_fit_their_types() {
        for setting in all() {
            let (whole, real) =
                (setting.kind.starts_with("whole number"), setting.kind == "number");
            let fits = match setting.range {
                NumberRange::Any => !whole && !real,
                NumberRange::Whole(..) => whole,
                NumberRange::Real(..) => real,
            };
            assert!(fits, "{}: {} within {:?}", setting.key, setting.kind, setting.range);
        }
    }

    #[test]
    fn defaults_are_within_their_ranges() {
        for (_, preset) in Preset::NAMES {
            for learns in [true, false] {
                TrainConfig::of_preset(preset, learns).check_ranges().unwrap();
            }
        }
    }

    #[test]
    fn settings_are_found_by_their_keys() {
        for (key, setting_there) in ConfigLayer::KEYS.iter().zip(all()) {
            assert_eq!((setting(key), *key), (setting_there, setting_there.key));
        }
        let message = ConfigLayer::default().set("bacth", "3").unwrap_err().to_string();
        assert!(message.contains("did you mean `batch`?"), "{message}");
    }
}
