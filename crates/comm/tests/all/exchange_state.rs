//! State of exchanges between steps: checkpoints, grown models, imports.

use meristem_comm::{
    Communicator, Error, Exchange, ExchangeOptions, ExchangeState, FeedbackMode, Method,
    SparseMethod,
};

use crate::common::ranks;
use crate::exchange::{MODEL, gradients, made, options, refused, step};

/// Six steps equal three steps, an export and import into another exchange, and three more steps.
#[test]
fn a_checkpoint_restores_an_exchange() {
    let sparse = [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: 4 }];
    for (method, keep) in
        sparse.into_iter().map(|sparse| (Method::Sparse(sparse), FeedbackMode::Residual)).chain([
            (Method::Sparse(SparseMethod::TopK), FeedbackMode::Momentum(0.5)),
            (Method::Auto, FeedbackMode::Residual),
            (Method::Int8, FeedbackMode::Residual),
            (Method::Int8, FeedbackMode::Momentum(0.5)),
        ])
    {
        // The warm-up ends after the third step.
        let warm_up = vec![0.5, 0.5, 0.3];
        let options = ExchangeOptions { keep, warm_up, ..options(method) };
        ranks(3, |mut comm, stream| {
            let mut whole = made(&options, stream, &MODEL).unwrap();
            let expected: Vec<_> =
                (0..7).map(|at| step(&mut whole, &mut comm, stream, at)).collect();
            let mut first = made(&options, stream, &MODEL).unwrap();
            for (at, expected) in expected[..4].iter().enumerate() {
                assert_eq!(step(&mut first, &mut comm, stream, at), *expected);
            }
            let state = first.export().unwrap();
            assert_eq!(state.step, 4);
            let mut second = made(&options, stream, &MODEL).unwrap();
            second.import(&comm, &state).unwrap();
            assert_eq!(second.export().unwrap(), state);
            for (at, expected) in expected.iter().enumerate().skip(4) {
                assert_eq!(step(&mut second, &mut comm, stream, at), *expected, "{method:?} {at}");
            }
        });
    }
}

/// The same for a measured choice of Ok-Topk, whose thresholds and regions are also state.
#[test]
fn a_checkpoint_restores_a_measured_choice() {
    let options = options(Method::Auto);
    ranks(8, |mut comm, stream| {
        let mut whole = made(&options, stream, &MODEL).unwrap();
        let expected: Vec<_> = (0..6).map(|at| step(&mut whole, &mut comm, stream, at)).collect();
        let mut first = made(&options, stream, &MODEL).unwrap();
        (0..3).for_each(|at| drop(step(&mut first, &mut comm, stream, at)));
        let state = first.export().unwrap();
        assert!(state.kept.values().any(|kept| !kept.split.is_empty()), "Ok-Topk was chosen");
        let mut second = made(&options, stream, &MODEL).unwrap();
        second.import(&comm, &state).unwrap();
        assert_eq!(second.export().unwrap(), state);
        for (at, expected) in expected.iter().enumerate().skip(3) {
            assert_eq!(step(&mut second, &mut comm, stream, at), *expected, "{at}");
        }
    });
}

#[test]
fn a_grown_model_keeps_the_state_of_its_parameters() {
    ranks(2, |mut comm, stream| {
        let options = options(Method::Sparse(SparseMethod::TopK));
        let mut exchange = made(&options, stream, &MODEL).unwrap();
        step(&mut exchange, &mut comm, stream, 0);
        let before = exchange.export().unwrap();
        let grown = [("a.weight", 300), ("seed", 200), ("c", 300)];
        let mut exchange = made(&options, stream, &grown).unwrap();
        exchange.import(&comm, &before).unwrap();
        let after = exchange.export().unwrap();
        assert_eq!(after.step, 1);
        for name in ["a.weight", "c"] {
            assert_eq!(after.kept[name], before.kept[name]);
        }
        let nothing: Vec<u8> = [(-0.0f32).to_ne_bytes(); 200].concat();
        assert_eq!(after.kept["seed"].residual, nothing);
        let mut other = made(&options, stream, &[("c", 200)]).unwrap();
        let error = other.import(&comm, &before).unwrap_err();
        refused(&error, "`Exchange::import`: `c` must be 800 bytes, as it is now, got 1200");
    });
}

/// An import replaces the whole state, or changes nothing.
#[test]
fn an_import_replaces_the_state() {
    let all = [SparseMethod::TopK, SparseMethod::OkTopK { refresh: 4 }].map(Method::Sparse);
    for (method, keep) in all.into_iter().chain([Method::Int8]).flat_map(|method| {
        [FeedbackMode::Residual, FeedbackMode::Momentum(0.5)].map(|keep| (method, keep))
    }) {
        let options = ExchangeOptions { keep, ..options(method) };
        ranks(2, |mut comm, stream| {
            let new = || made(&options, stream, &MODEL).unwrap();
            let (mut used, mut other) = (new(), new());
            let nothing = new().export().unwrap();
            for at in 0..3 {
                step(&mut used, &mut comm, stream, at);
                step(&mut other, &mut comm, stream, 7 + at);
            }
            step(&mut other, &mut comm, stream, 11);
            let (before, mut state) = (used.export().unwrap(), other.export().unwrap());
            let mut broken = state.clone();
            broken.kept.get_mut("c").unwrap().residual.push(0);
            let error = used.import(&comm, &broken).unwrap_err();
            refused(&error, "`Exchange::import`: `c` must be 1200 bytes, as it is now, got 1201");
            assert_eq!(used.export().unwrap(), before);

            let missing = ["b.weight", "a.weight"];
            missing.iter().for_each(|name| drop(state.kept.remove(*name)));
            used.import(&comm, &state).unwrap();
            let after = used.export().unwrap();
            missing.iter().for_each(|name| {
                drop(state.kept.insert((*name).into(), nothing.kept[*name].clone()))
            });
            assert_eq!(after, state);
            used.import(&comm, &ExchangeState::default()).unwrap();
            assert_eq!(used.export().unwrap(), nothing);
            let mut fresh = new();
            assert_eq!(
                step(&mut used, &mut comm, stream, 3),
                step(&mut fresh, &mut comm, stream, 3)
            );
        });
    }
}

/// All ranks know Ok-Topk's regions and step without communication, so a rank with other ones is
/// detected.
#[test]
fn different_states_of_ranks_are_detected() {
    let options = options(Method::Sparse(SparseMethod::OkTopK { refresh: 4 }));
    let refused = |change: &(dyn Fn(&mut Exchange, &Communicator, &[ExchangeState]) + Sync)| {
        let results = ranks(3, |mut comm, stream| {
            let mut exchange = made(&options, stream, &MODEL).unwrap();
            let mut states = vec![];
            for at in 0..6 {
                step(&mut exchange, &mut comm, stream, at);
                states.push(exchange.export().unwrap());
            }
            if comm.rank() == 1 {
                change(&mut exchange, &comm, &states);
            } else {
                exchange.import(&comm, &states[5]).unwrap();
            }
            let gradients = gradients(stream, comm.rank(), 6, &MODEL);
            exchange.run(&mut comm, &gradients.iter().collect::<Vec<_>>())
        });
        for result in &results {
            let Err(error) = result else { return false };
            assert!(matches!(error, Error::Disagreement { rank: 1, .. }), "{error:?}");
            assert!(error.to_string().contains("rank 1 has a state between calls"), "{error}");
        }
        true
    };
    assert!(!refused(&|exchange, comm, states| exchange.import(comm, &states[5]).unwrap()));
    // Another step with the same regions, other regions at the same step, no regions.
    assert!(refused(&|exchange, comm, states| exchange.import(comm, &states[4]).unwrap()));
    assert!(refused(&|exchange, comm, states| {
        let mut other = states[5].clone();
        for kept in other.kept.values_mut().filter(|kept| !kept.split.is_empty()) {
            let last = kept.split.len() - 4;
            kept.split[last] ^= 1;
        }
        exchange.import(comm, &other).unwrap();
    }));
    assert!(refused(&|exchange, comm, states| {
        let mut without = states[5].clone();
        without.kept.values_mut().for_each(|kept| kept.split.clear());
        exchange.import(comm, &without).unwrap();
    }));
}
