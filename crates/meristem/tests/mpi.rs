//! Training over processes: the same bits as over threads, and an error on all ranks if one fails.
//!
//! A test starts `mpirun` with the meristem binary. `mpirun` may mix the output of several
//! processes within a line, so each rank writes to separate files.
#![allow(clippy::unwrap_used, reason = "a test may panic, its helpers too")]
#![cfg(unix)]

#[path = "all/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use meristem::nn::safetensors;

use common::Meristem;
use common::process::{Process, wait_for};
use common::runs::{Outcome, assert_same, outcome, with_images};

/// Settings of two rounds of growing hosts on a few small images, with a learning policy.
const RUN: &str = "train --controller ppo --dataset arrays --data-root images.safetensors \
                   --preset quick --host minimal --slots r0,r1 --envs 4 --rounds 2 --steps 8 \
                   --batch 16 --control-split 0.2 --policy-hidden 16 --checkpoint-every 2 \
                   --threads 1 --log-batches";

/// Time limit of a run in seconds.
const PATIENCE: &str = "180";
/// Shell script that runs its arguments, with output in files named by rank.
const RANK: &str = "exec \"$0\" \"$@\" >said.$OMPI_COMM_WORLD_RANK 2>erred.$OMPI_COMM_WORLD_RANK";

/// `mpirun` with these flags, and one rank with each of these arguments.
fn mpirun(m: &Meristem, flags: &[&str], ranks: &[&str]) -> Command {
    mpirun_by(RANK, m, flags, ranks)
}

/// [`mpirun`] whose ranks a shell script starts.
fn mpirun_by(script: &str, m: &Meristem, flags: &[&str], ranks: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", PATIENCE, "mpirun", "--allow-run-as-root", "--oversubscribe"]);
    command.args(flags).current_dir(m.folder.path());
    // The tests read this variable; the program refuses variables with its prefix that it does not
    // know.
    command.env_remove("MERISTEM_TEST_DEVICE");
    for (rank, arguments) in ranks.iter().enumerate() {
        command.args((rank > 0).then_some(":")).args(["-n", "1", "sh", "-c", script]);
        command.arg(env!("CARGO_BIN_EXE_meristem")).args(arguments.split_whitespace());
    }
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Runs a command to its end.
fn ends(mut command: Command) -> ExitStatus {
    let status = command.status().unwrap();
    assert_ne!(status.code(), Some(124), "it hangs");
    status
}

/// Runs a command on several ranks, which must succeed. Only rank 0 may write output.
fn ok(m: &Meristem, ranks: usize, arguments: &str) {
    let status = ends(mpirun(m, &[], &vec![arguments; ranks]));
    assert!(status.success(), "{arguments}: {}", rank_errors(m, 0));
    assert!(rank_output(m, "said", 0).contains("env"), "the first tells of it");
    for rank in 1..ranks {
        assert_eq!(
            (rank_output(m, "said", rank), rank_output(m, "erred", rank)),
            Default::default()
        );
    }
}

fn rank_output(m: &Meristem, file: &str, rank: usize) -> String {
    fs::read_to_string(m.path(&format!("{file}.{rank}"))).unwrap_or_default()
}

/// Output of a rank on stderr, without line breaks.
fn rank_errors(m: &Meristem, rank: usize) -> String {
    rank_output(m, "erred", rank).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Asserts that some rank has reported an error that all ranks find: when the first has exited,
/// mpirun ends the others, perhaps before they report it.
fn assert_reported(m: &Meristem, ranks: usize, words: &str) {
    let errors: Vec<String> = (0..ranks).map(|rank| rank_errors(m, rank)).collect();
    assert!(errors.iter().any(|error| error.contains(words)), "{words}: {errors:?}");
}

/// Tensors of all checkpoints of a run.
fn checkpoints(m: &Meristem, run: &str) -> Vec<(String, meristem::nn::StateDict)> {
    let files = fs::read_dir(m.path(run).join("checkpoints")).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    let read = |path: std::path::PathBuf| {
        let (mut state, _) = safetensors::load(&path).unwrap();
        // Contains times.
        state.0.remove("progress").unwrap();
        (path.file_name().unwrap().to_string_lossy().into_owned(), state)
    };
    files.into_iter().map(read).collect()
}

/// Runs with threads in the folder `run`. Returns the outcome.
fn threads(m: &Meristem, flags: &str, run: &str) -> Outcome {
    m.ok(&format!("{RUN} {flags} --comm threads --run-dir {run}"));
    outcome(m, run)
}

#[test]
fn processes_give_the_bits_of_threads() {
    let m = with_images();
    let cases = [
        (1, "dense", "dealt"),
        (2, "dense", "full"),
        (2, "topk:0.05", "dealt"),
        (4, "ok-topk:0.05", "full"),
    ];
    for (ranks, exchange, epoch) in cases {
        let flags = format!("--exchange {exchange} --epoch {epoch}");
        let [one, other] =
            ["threads", "mpi"].map(|comm| format!("{comm}-{ranks}-{}", &exchange[..4]));
        let expected = threads(&m, &format!("{flags} --ranks {ranks}"), &one);
        ok(&m, ranks, &format!("{RUN} {flags} --comm mpi --run-dir {other}"));
        assert_same(&outcome(&m, &other), &expected, &other);
        assert!(checkpoints(&m, &other) == checkpoints(&m, &one), "{other}: other checkpoints");
        let summary = m.json(&format!("{other}/summary.json"));
        assert_eq!(summary["hot_path"]["copies_to_host"], 0.0);
        assert_eq!((&summary["ranks"], &summary["exchange"]), (&ranks.into(), &exchange.into()));
        let kinds = |kind: &str| expected.events.iter().filter(|e| e["event"] == kind).count();
        assert!(kinds("batch_completed") > 0 && kinds("module_germinated") > 0);
        let fingerprints =
            expected.events.iter().filter(|event| event.get("fingerprint").is_some()).count();
        assert_eq!(fingerprints, if ranks == 1 { 0 } else { 2 });
        let kept = checkpoints(&m, &other).pop().unwrap().1;
        let residual = kept.iter().any(|(name, _)| name.contains("rank.1.exchange.residual"));
        assert_eq!(residual, exchange != "dense", "residuals are in the checkpoint");
    }
}

/// With data-parallel ranks, each process trains the env on its part of the samples.
#[test]
fn a_host_on_processes_has_the_bits_of_threads() {
    let m = with_images();
    let run = RUN.replace("--envs 4", "--envs 1").replace("--batch 16", "--batch 12");
    let run = format!("{run} --data-parallel").replace("--controller ppo ", "");
    for (ranks, flags) in [
        (2, "--controller heuristic --exchange dense"),
        (3, "--controller ppo --exchange topk:0.05"),
        (4, "--controller heuristic --exchange diloco:2:int8 --optimizer adam"),
    ] {
        let [one, other, cut] = ["threads", "mpi", "cut"].map(|comm| format!("{comm}-{ranks}"));
        m.ok(&format!("{run} {flags} --ranks {ranks} --run-dir {one}"));
        let expected = outcome(&m, &one);
        ok(&m, ranks, &format!("{run} {flags} --comm mpi --run-dir {other}"));
        assert_same(&outcome(&m, &other), &expected, &other);
        assert!(checkpoints(&m, &other) == checkpoints(&m, &one), "{other}: other checkpoints");
        let step = expected.events.iter().find(|event| event["event"] == "step_completed").unwrap();
        assert!(step.get("fingerprint").is_some(), "{step}");
        let (arguments, events) =
            (&format!("{run} {flags} --comm mpi --run-dir {cut}"), expected.events.len() / 2);
        Signalled { ranks, arguments, folder: &cut, events, to: &[1], ..KILLED }.run(&m);
        ok(&m, ranks, &format!("train --resume {cut}"));
        assert_same(&outcome(&m, &cut), &expected, &cut);
    }
}

/// A failure between steps reaches ranks that are already in the next step at once, before the
/// deadline, which exceeds the time limit of the test.
#[test]
fn a_checkpoint_that_cannot_be_written_ends_all_ranks_of_a_host() {
    let m = with_images();
    let run = RUN.replace("--envs 4", "--envs 1").replace("--steps 8", "--steps 100000");
    let run = format!("{run} --data-parallel --controller none --comm mpi --run-dir full");
    let mut child = Process::start(&mut mpirun(&m, &[], &[run.as_str(); 2]));
    let folder = m.path("full/checkpoints");
    wait_for("a checkpoint", || folder.exists());
    wait_for("a file in the place of checkpoints", || {
        let _ = fs::remove_dir_all(&folder);
        fs::write(&folder, "").is_ok()
    });
    let status = child.wait().unwrap();
    assert!(
        !matches!(status.code(), Some(0 | 124)),
        "it hangs, or has nowhere to write to: {status}"
    );
    let error = m.json("full/summary.json")["error"].to_string();
    assert!(error.contains("checkpoints"), "{error}");
}

/// Process ids of the ranks, by rank.
fn ranks_of(mpirun: &Process) -> Vec<String> {
    let children = |of: &str| {
        let found = Command::new("pgrep").args(["-P", of]).output().unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        found.lines().map(str::to_string).collect::<Vec<String>>()
    };
    let timeout = mpirun.id().to_string();
    let mut ranks: Vec<(usize, String)> = vec![];
    for process in children(&timeout).iter().flat_map(|mpirun| children(mpirun)) {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap();
        let mut entries = environment.split(|byte| *byte == 0);
        let rank = entries.find_map(|entry| entry.strip_prefix(b"OMPI_COMM_WORLD_RANK="));
        ranks.push((String::from_utf8_lossy(rank.unwrap()).parse().unwrap(), process));
    }
    ranks.sort();
    ranks.into_iter().map(|(_, process)| process).collect()
}

/// A run in which some ranks get a signal after it has written some events.
struct Signalled<'a> {
    /// Flags of `mpirun`.
    flags: &'a [&'a str],
    ranks: usize,
    arguments: &'a str,
    /// Run folder, and number of events after which the signal is sent.
    folder: &'a str,
    events: usize,
    signal: &'a str,
    to: &'a [usize],
}

/// Both ranks of a run are killed.
const KILLED: Signalled<'_> = Signalled {
    flags: &[],
    ranks: 2,
    arguments: "",
    folder: "",
    events: 0,
    signal: "-KILL",
    to: &[0, 1],
};

impl Signalled<'_> {
    fn run(&self, m: &Meristem) {
        let Self { flags, ranks, arguments, folder, events, signal, to } = *self;
        let mut child = Process::start(&mut mpirun(m, flags, &vec![arguments; ranks]));
        wait_for("events", || {
            let text = fs::read_to_string(m.path(folder).join("events.jsonl")).unwrap_or_default();
            text.lines().count() >= events
        });
        let ranks = ranks_of(&child);
        let processes = to.iter().map(|rank| ranks[*rank].as_str());
        assert!(Command::new("kill").arg(signal).args(processes).status().unwrap().success());
        assert_ne!(child.wait().unwrap().code(), Some(124), "it hangs");
    }
}

#[test]
fn a_killed_run_of_processes_resumes_with_the_same_bits() {
    let m = with_images();
    let flags = "--exchange topk:0.05";
    let expected = threads(&m, &format!("{flags} --ranks 2"), "whole");
    let lines = expected.events.len();
    let start = |run: &str| format!("{RUN} {flags} --comm mpi --run-dir {run}");
    // Both ranks at once, in both rounds.
    let resume = "train --resume cut --comm mpi";
    let cut = Signalled { folder: "cut", ..KILLED };
    Signalled { arguments: &start("cut"), events: lines / 3, ..cut }.run(&m);
    Signalled { arguments: resume, events: 2 * lines / 3, ..cut }.run(&m);
    for other in [1, 3] {
        assert!(!ends(mpirun(&m, &[], &vec![resume; other])).success());
        assert_reported(&m, other, "it has 2 ranks");
    }
    ok(&m, 2, resume);
    assert_same(&outcome(&m, "cut"), &expected, "killed");
    ok(&m, 2, resume);
    assert!(
        rank_output(&m, "said", 0).contains("cut is complete"),
        "{}",
        rank_output(&m, "said", 0)
    );
    // Only one rank: with recovery, mpirun does not end the other, which reports the failure.
    let deadline = &format!("{} --comm-deadline 10", start("one"));
    let one = Signalled { arguments: deadline, folder: "one", events: lines / 3, ..KILLED };
    Signalled { flags: &["--enable-recovery"], to: &[1], ..one }.run(&m);
    let summary = m.json("one/summary.json");
    assert_eq!(summary["status"], "failed");
    let error = summary["error"].as_str().unwrap();
    assert!(error.contains("rank 1 did not arrive within 10 s"), "{error}");
    assert!(
        rank_errors(&m, 0).contains("rank 1 did not arrive")
            && rank_errors(&m, 0).contains("--resume RUN")
    );
    // The run's folder has its settings.
    ok(&m, 2, "train --resume one");
    assert_same(&outcome(&m, "one"), &expected, "one killed");
    // A run of processes resumes with threads with the same bits, and vice versa.
    let over = &start("over");
    Signalled { arguments: over, folder: "over", events: lines / 2, to: &[1, 0], ..KILLED }.run(&m);
    m.ok("train --resume over --comm threads --quiet");
    assert_same(&outcome(&m, "over"), &expected, "from mpi to threads");
    let mut command = m.command();
    command.args(RUN.split_whitespace()).args(flags.split_whitespace());
    command.args(["--ranks", "2", "--run-dir", "back"]).stdout(Stdio::null());
    let mut child = Process::start(&mut command);
    wait_for("a checkpoint", || m.path("back/checkpoints").exists());
    child.kill().unwrap();
    child.wait().unwrap();
    ok(&m, 2, "train --resume back --comm mpi");
    assert_same(&outcome(&m, "back"), &expected, "from threads to mpi");
}

/// If one rank is asked to stop, all ranks stop at the same step.
#[test]
fn a_signal_to_one_rank_stops_all_ranks() {
    let m = with_images();
    let expected = threads(&m, "--ranks 2", "whole");
    let arguments = &format!("{RUN} --comm mpi --run-dir stopped");
    let (folder, events) = ("stopped", expected.events.len() / 3);
    Signalled { arguments, folder, events, signal: "-TERM", to: &[1], ..KILLED }.run(&m);
    assert_eq!(m.json("stopped/summary.json")["status"], "interrupted");
    ok(&m, 2, "train --resume stopped --comm mpi");
    assert_same(&outcome(&m, "stopped"), &expected, "stopped");
}

#[test]
fn invalid_settings_of_ranks_are_refused_without_files() {
    let m = with_images();
    let run = format!("{RUN} --comm mpi --run-dir no");
    let other = |flags: &str| format!("{run} {flags}");
    fs::create_dir(m.path("there")).unwrap();
    fs::write(m.path("there/notes"), "x").unwrap();
    for (first, second, words) in [
        ("", "--seed 2", "rank 1: it has `seed = 2`, rank 0 has `seed = 42`"),
        ("", "--data-root nowhere.safetensors", "rank 1: the arrays dataset is not in nowhere"),
        (
            "--checkpoint-every 3",
            "",
            "rank 1: it has `checkpoint_every = 2`, rank 0 has `checkpoint_every = 3`",
        ),
        ("--ranks 4", "--ranks 4", "`ranks`: got 4, expected 2, the number of processes"),
        ("--envs 3", "--envs 3", "a divisor of 3, the number of envs"),
        ("--controller random", "--controller random", "controller ppo"),
        ("--run-dir there", "--run-dir there", "the run folder there exists"),
        ("--comm threads", "--comm threads", "`comm`: got 2 unconnected processes"),
    ] {
        let status = ends(mpirun(&m, &[], &[&other(first), &other(second)]));
        assert!(!status.success(), "{words}");
        assert_reported(&m, 2, words);
        // A rank that mpirun has ended before has no error. An error before the transport is open
        // names no ranks.
        let errors = rank_errors(&m, 1);
        let error = errors.split("error: ").nth(1).unwrap_or_default();
        let named = error.starts_with("rank ") || words.starts_with("`comm`");
        assert!(error.is_empty() || named, "{errors}");
        assert!(!m.path("no").exists(), "{words}");
    }
}

/// A path may have different contents on the machines of different ranks. Here it is a file
/// descriptor, which each rank has opened for a separate file.
#[test]
fn ranks_with_other_scripts_are_refused() {
    let m = with_images();
    let line = |step: usize| format!("{{\"step\":{step},\"op\":\"WAIT\"}}\n");
    (0..2).for_each(|rank| fs::write(m.path(&format!("script.{rank}")), line(rank)).unwrap());
    let run = RUN.replace("--envs 4", "--envs 1").replace("--controller ppo ", "");
    let run = format!("{run} --data-parallel --controller fixed:/dev/fd/3 --comm mpi --run-dir");
    let with_files = |files: &str, folder: &str| {
        let script = format!("exec 3<{files}; {RANK}");
        let arguments = format!("{run} {folder}");
        ends(mpirun_by(&script, &m, &[], &[&arguments, &arguments]))
    };
    assert!(!with_files("script.$OMPI_COMM_WORLD_RANK", "no").success());
    assert_reported(&m, 2, "rank 1: its file of --controller differs from rank 0's");
    assert!(!m.path("no").exists());
    assert!(with_files("script.0", "yes").success(), "{}", rank_errors(&m, 0));
}

/// Envs fail and are rolled back on every rank; an env that fails too often ends the run on all
/// ranks.
#[test]
fn rank_0_reports_an_env_that_fails_on_another_rank() {
    let m = with_images();
    let wild = "--ranks 2 --lr 30 --clip-norm off";
    let told = |run: &str| -> Vec<serde_json::Value> {
        let events = m.events(run);
        let of_rank_1 = events.into_iter().filter(|event| event["env"].as_u64() >= Some(2));
        let failed =
            of_rank_1.filter(|e| e["event"] == "governor_rollback" || e["event"] == "anomaly");
        failed
            .map(|mut event| {
                event
                    .as_object_mut()
                    .unwrap()
                    .retain(|key, _| !["seq", "seconds", "crc32"].contains(&&**key));
                event
            })
            .collect()
    };
    m.run(&format!("{RUN} {wild} --run-dir one"));
    ends(mpirun(&m, &[], &[format!("{RUN} {wild} --comm mpi --run-dir two").as_str(); 2]));
    let rollbacks = told("one").len();
    assert!(rollbacks > 0, "nothing failed, nothing was shown");
    assert_eq!(told("two")[..rollbacks], told("one"));
    let status = |run: &str| m.json(&format!("{run}/summary.json"))["status"].clone();
    assert_eq!(status("two"), status("one"));
}

/// All ranks have the same settings, so rank 0 alone prints remarks about settings.
#[test]
fn a_remark_about_settings_is_printed_by_one_rank() {
    let m = with_images();
    let settings = "--rounds 1 --steps 2 --lr-warmup 99 --lr 0.1 --lr 0.2";
    ok(&m, 2, &format!("{RUN} {settings} --comm mpi --run-dir run"));
    let remarks = rank_errors(&m, 0);
    for remark in ["--lr-warmup 99 is longer", "--lr was given more than once"] {
        assert_eq!(remarks.matches(remark).count(), 1, "{remarks}");
    }
}

/// Sums of GPUs over an MPI library that takes no memory of a GPU go through host memory, which
/// rank 0 says with its cost. On the processor there is nothing to say. CI runs it on the stand-in
/// for the CUDA driver, too.
#[test]
fn gpus_over_mpi_are_named_as_slow() {
    let m = with_images();
    let device = std::env::var("MERISTEM_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    let run = format!("{RUN} --rounds 1 --steps 2 --comm mpi --devices {device} --run-dir");
    ok(&m, 2, &format!("{run} run"));
    let words = [
        "a dense sum of N bytes copies 1.00 N bytes from each GPU",
        "processes with --comm nccl send from GPU to GPU",
    ];
    let said = rank_errors(&m, 0);
    for words in words {
        assert_eq!(said.contains(words), device.starts_with("cuda"), "{said}");
    }
}

/// A library that says that it takes memory of a GPU, as Open MPI built with CUDA does, gets it:
/// the bits of threads, no warning, and no copy to the host for gradients. Only on the stand-in,
/// whose memory of a GPU any library can access.
#[test]
fn gpus_over_mpi_exchange_by_address() {
    let device = std::env::var("MERISTEM_TEST_DEVICE").unwrap_or_default();
    if !device.starts_with("cuda") || Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let m = with_images();
    fs::write(m.path("aware.c"), "int MPIX_Query_cuda_support(void) { return 1; }").unwrap();
    let mut compile = Command::new("mpicc");
    compile.args(["-shared", "-fPIC", "-o", "aware.so", "aware.c"]).current_dir(m.folder.path());
    assert!(compile.status().unwrap().success());
    let run = RUN.replace("--rounds 2 --steps 8", "--rounds 1 --steps 3");
    let replicas = run.replace("--envs 4", "--envs 1 --data-parallel");
    let replicas = replicas.replace("--controller ppo", "--controller heuristic");
    let copies = |run: &str| {
        let summary = m.json(&format!("{run}/summary.json"));
        summary["hot_path"]["copies_to_host"].as_f64().unwrap()
    };
    for (name, run) in [("policy", run), ("replicas", replicas)] {
        let run = format!("{run} --exchange topk:0.05 --devices {device} --run-dir {name}");
        let threads = format!("{run}-threads --comm threads --ranks 2");
        let mut command = m.command();
        command.args(threads.split_whitespace()).env_remove("MERISTEM_TEST_DEVICE");
        assert!(command.stdout(Stdio::null()).status().unwrap().success());
        let expected = outcome(&m, &format!("{name}-threads"));
        let by_address = format!("{run}-address --comm mpi");
        let mut command = mpirun(&m, &[], &[&by_address, &by_address]);
        command.env("LD_PRELOAD", m.path("aware.so"));
        assert!(ends(command).success(), "{}", rank_errors(&m, 0));
        assert!(!rank_errors(&m, 0).contains("host memory"), "{}", rank_errors(&m, 0));
        assert_same(&outcome(&m, &format!("{name}-address")), &expected, name);
        assert_eq!(copies(&format!("{name}-address")), 0.0, "{name}");
        if name == "replicas" {
            ok(&m, 2, &format!("{run}-host --comm mpi"));
            assert!(copies("replicas-host") > 0.0, "nothing was exchanged");
        }
    }
}

/// With `--comm-debug` the collectives and the library log their operations.
#[test]
fn comm_debug_logs_the_exchange_and_its_library() {
    let m = Meristem::new();
    let bench = "bench comm --comm mpi --max-size 1KiB --density 0.1 --rounds 1 --json";
    for (debug, words) in [(format!("{bench} --comm-debug"), true), (bench.to_string(), false)] {
        assert!(
            ends(mpirun(&m, &[], &[&debug, &debug])).success(),
            "{}",
            rank_output(&m, "erred", 0)
        );
        for rank in 0..2 {
            let erred = rank_output(&m, "erred", rank);
            for word in ["meristem::comm", "meristem::placement::comm", "ok_topk", "btl:"] {
                assert_eq!(erred.contains(word), words, "{word}: {erred}");
            }
        }
        assert!(rank_output(&m, "said", 0).contains("\"wrong\":0"));
    }
}
