//! Policies that learn, rewards, and ranks of `meristem train`.

use crate::common::{Meristem, of_kind};

/// Weights of the reward can be set by flags and files.
#[test]
fn rewards_use_the_weights_in_the_settings() {
    let m = Meristem::new();
    std::fs::write(m.path("c.toml"), "reward_gain = 0.0\nreward_rent_max = 0\n").unwrap();
    m.ok("train --controller random --host minimal --envs 2 --steps 6 --max-batches 2 --batch 32 \
          --rounds 1 --config c.toml --reward-op-price 0.5 --run-dir run --quiet");
    let events = m.events("run");
    let mut prices = 0;
    for event in of_kind(&events, "step_completed") {
        let reward = &event["reward"];
        let term = |key: &str| reward[key].as_f64().unwrap();
        assert_eq!((term("gain"), term("rent")), (0.0, 0.0), "{event}");
        assert!([0.0, -0.5].contains(&term("op")), "{event}");
        prices += u32::from(term("op") < 0.0);
    }
    assert!(prices > 0, "only waited");
}

/// A policy learns over rounds; it is reported, saved and resumed.
#[test]
fn a_policy_learns_and_is_saved() {
    let m = Meristem::new();
    let tiny = "--controller ppo --host minimal --envs 2 --steps 6 --max-batches 2 --batch 32 \
                --policy-hidden 16";
    let said = m.ok(&format!("train {tiny} --rounds 2 --slots r0 --hot-scope deny --run-dir run"));
    for words in ["round 2/2 step   6/6  ", "round 2: mean accuracy "] {
        assert!(said.stdout.contains(words), "{words}: {}", said.stdout);
    }
    assert!(!said.stdout.contains("KL "), "only with --verbose: {}", said.stdout);
    let summary = m.json("run/summary.json");
    let events = m.events("run");
    let updates = of_kind(&events, "policy_updated");
    assert_eq!(updates.len(), 2);
    for (round, update) in updates.iter().enumerate() {
        assert_eq!((&update["round"], &update["transitions"]), (&round.into(), &12.into()));
        assert_eq!(update["entropies"].as_array().unwrap().len(), 8);
        // The sum of all reward terms equals the reward that the policy reports.
        let of_round = events.iter().filter(|e| e["event"] == "step_completed");
        let paid: f64 = of_round
            .filter(|e| e["round"] == round)
            .flat_map(|e| e["reward"].as_object().unwrap().values())
            .map(|term| term.as_f64().unwrap())
            .sum();
        // The summary has the same figures.
        let told = &summary["round_results"][round]["policy"];
        for key in ["mean_return", "kl", "entropies", "explained_variance", "ops"] {
            assert_eq!(told[key], update[key], "{key}");
        }
        assert!((update["mean_return"].as_f64().unwrap() - paid / 2.0).abs() < 1e-4, "{update}");
    }
    let go_on = "train --host minimal --envs 3 --steps 4 --max-batches 2 --batch 32";
    let ppo = format!("{go_on} --controller ppo");
    m.ok(&format!("{ppo} --slots r0 --policy run/policy.safetensors --run-dir on"));
    m.fails(
        &format!("{ppo} --slots r0c0 --policy run/policy.safetensors --run-dir no"),
        2,
        &["for 3 slots", "this run has 1"],
    );
    assert!(!m.path("no").exists(), "nothing is left behind");
    let printed = m.ok(&format!("{ppo} --policy run/policy.safetensors --print-config")).stdout;
    assert!(printed.lines().any(|line| line == "policy_hidden = 16"), "{printed}");
    m.fails(
        &format!("{go_on} --controller none --policy run/policy.safetensors"),
        2,
        &["`controller`: got none, expected ppo"],
    );
    let narrow = format!("{ppo} --policy run/policy.safetensors --policy-hidden 8 --run-dir no");
    m.fails(&narrow, 2, &["`policy-hidden`: got 8, expected 16, the width of the policy in run"]);
    assert!(!m.path("no").exists(), "nothing is left behind");
    m.ok(&format!("{go_on} --controller random --run-dir random"));
    std::fs::write(m.path("a.jsonl"), "{\"step\": 1, \"op\": \"JUMP\"}\n").unwrap();
    m.fails(&format!("{go_on} --controller fixed:a.jsonl"), 2, &["line 1", "JUMP"]);
    let text = "{\"step\":0,\"op\":\"GERMINATE\",\"slot\":\"r0c1\",\"blueprint\":\"conv_small\"}\n";
    std::fs::write(m.path("a.jsonl"), text).unwrap();
    m.ok(&format!("{go_on} --controller fixed:a.jsonl --run-dir fixed"));
    assert_eq!(of_kind(&m.events("fixed"), "module_germinated").len(), 3);
}

/// A policy learns over ranks: one run folder, the same policy on all ranks, the same bits.
#[test]
fn a_policy_learns_over_ranks() {
    let m = Meristem::new();
    let tiny =
        "train --host minimal --envs 4 --steps 6 --max-batches 2 --batch 32 --control-split 0.02";
    let ppo = format!(
        "{tiny} --controller ppo --policy-hidden 16 --slots r0 --rounds 2 --hot-scope deny"
    );
    let fingerprints = |run: &str| -> Vec<String> {
        let events = m.events(run);
        let updates = of_kind(&events, "policy_updated");
        // The transitions of all ranks are counted.
        updates.iter().for_each(|update| assert_eq!(update["transitions"], 24));
        updates.iter().filter_map(|u| Some(u["fingerprint"].as_str()?.to_string())).collect()
    };
    for (run, exchange, threads) in
        [("dense", "dense", 2), ("one", "topk:0.05", 1), ("two", "topk:0.05", 2)]
    {
        let ranks = format!("--comm threads --ranks 2 --exchange {exchange}");
        let said = m.ok(&format!("{ppo} {ranks} --threads {threads} --verbose --run-dir {run}"));
        assert!(said.stdout.contains("on all ranks"), "{}", said.stdout);
        assert!((0..4).all(|env| m.path(&format!("{run}/weights/env-{env}.safetensors")).exists()));
        let seen = fingerprints(run);
        assert!(seen.len() == 2 && seen[0] != seen[1], "{seen:?}");
    }
    assert_eq!(fingerprints("one"), fingerprints("two"));
    assert!(m.bytes("one/policy.safetensors") == m.bytes("two/policy.safetensors"));
    assert_ne!(fingerprints("one"), fingerprints("dense"));
    m.ok(&format!("{ppo} --run-dir alone"));
    assert!(fingerprints("alone").is_empty(), "alone there is nobody to compare with");
    m.ok("train --config one/config.toml --run-dir again");
    assert_eq!(fingerprints("again"), fingerprints("one"));
    let taught = "--ppo-demonstrations 1 --steps 9 --min-training-steps 1 --max-gap 99";
    m.ok(&format!("{ppo} --ranks 2 {taught} --run-dir taught"));
    m.ok(&format!("{ppo} {taught} --rounds 1 --controller heuristic --run-dir teacher"));
    let actions = |run: &str| -> Vec<String> {
        let events = m.events(run);
        let first = of_kind(&events, "step_completed").into_iter().filter(|e| e["round"] == 0);
        first.map(|step| step["action"].as_str().unwrap().into()).collect()
    };
    assert!(actions("teacher").iter().any(|action| action.starts_with("GERMINATE")));
    assert_eq!(actions("taught"), actions("teacher"), "the heuristic acts, on every rank");
    m.fails(
        &format!("{ppo} --ranks 3"),
        2,
        &["`ranks`: got 3", "divisor of 4, the number of envs"],
    );
    m.fails(&format!("{tiny} --controller random --ranks 2"), 2, &["controller ppo"]);
    m.fails(&format!("{ppo} --exchange topk:0.1"), 2, &["`exchange`", "at least 2 `ranks`"]);
    m.fails(&format!("{ppo} --ranks 2 --exchange topk"), 2, &["topk:D"]);
    let local = format!("{ppo} --ranks 2 --exchange diloco:8");
    m.fails(&local, 2, &["`exchange`: got diloco:8", "diloco needs data-parallel"]);
    m.fails(&format!("{ppo} --ranks 2 --comm mpl"), 2, &["did you mean `mpi`"]);
    m.fails(&format!("{ppo} --comm-deadline 0"), 2, &["`comm-deadline`"]);
    #[cfg(not(feature = "mpi"))]
    m.fails(&format!("{ppo} --comm mpi"), 2, &["this build has no MPI", "`--features mpi`"]);
}

/// One host on several ranks: valid and invalid settings.
#[test]
fn a_host_is_trained_by_all_ranks() {
    let m = Meristem::new();
    let tiny = "train --data-parallel --host minimal --steps 2 --max-batches 2 --batch 32";
    let none = format!("{tiny} --controller none");
    m.ok(&format!("{none} --ranks 2 --exchange auto:0.01 --run-dir two"));
    assert!(m.path("two/weights/env-0.safetensors").exists());
    assert!(!m.path("two/weights/env-1.safetensors").exists());
    for step in of_kind(&m.events("two"), "step_completed") {
        assert_eq!(step["fingerprint"].as_str().unwrap().len(), 16);
    }
    m.ok("train --config two/config.toml --run-dir again");
    assert!(m.bytes("two/weights/env-0.safetensors") == m.bytes("again/weights/env-0.safetensors"));
    // With --data-parallel the policy has one env, and learns without exchange.
    let ppo = format!("{tiny} --controller ppo --policy-hidden 8");
    m.ok(&format!("{ppo} --ranks 2 --rounds 2 --run-dir ppo"));
    assert_eq!(of_kind(&m.events("ppo"), "policy_updated").len(), 2);
    m.fails(&format!("{none} --ranks 2 --envs 2"), 2, &["`envs`: got 2", "data-parallel"]);
    m.fails(
        &format!("{none} --ranks 3"),
        2,
        &["`ranks`: got 3", "divisor of 32, the samples of a batch"],
    );
    m.fails(&format!("{none} --ranks 4 --batch 2"), 2, &["`ranks`: got 4", "divisor of 2"]);
    m.fails(&format!("{none} --exchange topk:0.01"), 2, &["`exchange`", "at least 2 `ranks`"]);
    // Local steps.
    let local = format!("{none} --max-batches 5 --ranks 2 --exchange");
    m.ok(&format!("{local} diloco:2:int8 --run-dir local"));
    let summary = m.json("local/summary.json");
    assert_eq!(summary["exchange"], "diloco:2:int8");
    assert!(summary["exchange_bytes"].as_u64() > Some(0), "{summary}");
    for step in of_kind(&m.events("local"), "step_completed") {
        assert_eq!(step["fingerprint"].as_str().unwrap().len(), 16);
    }
    m.ok(&format!("{local} diloco:5"));
    m.fails(
        &format!("{local} diloco:6"),
        2,
        &["`exchange`: got diloco:6", "at most 5 local steps"],
    );
    m.fails(&format!("{local} diloco:0"), 2, &["from 1 to 4294967295"]);
    m.fails(&format!("{local} dilocco:2"), 2, &["did you mean `diloco:H`"]);
    let alone = format!("{none} --exchange diloco:2");
    m.fails(&alone, 2, &["`exchange`", "at least 2 `ranks`"]);
    let without = none.replace("--data-parallel", "");
    m.fails(&format!("{without} --ranks 2"), 2, &["data-parallel"]);
}

/// With an extreme learning rate updates are skipped, then the run ends with an error and a
/// readable folder.
#[test]
fn a_policy_that_diverges_ends_the_run() {
    let m = Meristem::new();
    let tiny = "--controller ppo --host minimal --envs 2 --steps 6 --max-batches 2 --batch 32 \
                --policy-hidden 16 --control-split 0.02";
    let words = ["the policy diverged", "lower learning rate"];
    m.fails(&format!("train {tiny} --rounds 20 --ppo-lr 1e30 --run-dir run"), 1, &words);
    let summary = m.json("run/summary.json");
    assert_eq!(summary["status"], "failed");
    let skipped = |event: &&&serde_json::Value| event["skipped"] == 1;
    assert!(of_kind(&m.events("run"), "policy_updated").iter().filter(skipped).count() >= 2);
    assert!(m.path("run/weights/env-1.safetensors").is_file());
    // Settings of the policy are part of the run's identity.
    let flags = "--ppo-lr 0.01 --ppo-epochs 2 --ppo-entropy-weight 0 --ppo-gamma 0.9 --rounds 2";
    m.ok(&format!("train {tiny} {flags} --run-dir other --quiet"));
    m.ok(&format!("train {tiny} --rounds 2 --run-dir usual --quiet"));
    let policy = |run: &str| m.bytes(&format!("{run}/policy.safetensors"));
    assert_ne!(policy("other"), policy("usual"));
    m.ok("train --config other/config.toml --run-dir again --quiet");
    assert_eq!(policy("other"), policy("again"));
}
