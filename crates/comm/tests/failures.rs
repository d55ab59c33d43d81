//! A rank that dies or disagrees ends all others, with an error that names it.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod common;

use common::{on, open, options, upload};
use meristem_comm::{
    Call, CommOptions, Communicator, Error, Keep, Order, Parcel, Reduction, Result, Sparse,
    SparseSum, Sum,
};
use meristem_device::Stream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Runs `usual` on all ranks but one, which runs `odd`; all results.
fn with_odd_one(
    n: usize,
    odd: usize,
    other: impl Fn(&mut Communicator, &Stream) -> Result<()> + Sync,
) -> Vec<Result<()>> {
    on(&open(), Communicator::threads(n, &options()).unwrap(), |mut comm, stream| {
        if comm.rank() == odd {
            other(&mut comm, stream)
        } else {
            let x = upload(stream, &[1.0f32; 8]);
            comm.all_reduce(&x, Reduction::Sum)?;
            comm.all_reduce(&x, Reduction::Sum)
        }
    })
}

#[test]
fn who_disagrees_is_named_on_every_rank() {
    type Odd = fn(&mut Communicator, &Stream) -> Result<()>;
    let sum = |comm: &mut Communicator, stream: &Stream| {
        comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum)
    };
    sum(&mut Communicator::threads(1, &options()).unwrap().remove(0), &open().stream("s")).unwrap();
    let odd: [(Odd, &[&str]); 6] = [
        (|comm, s| comm.all_reduce(&upload(s, &[1.0f32; 7]), Reduction::Sum), &["count 7", "8"]),
        (|comm, s| comm.all_reduce(&upload(s, &[1.0f64; 8]), Reduction::Sum), &["type f64", "f32"]),
        (|comm, s| comm.all_reduce(&upload(s, &[1.0f32; 8]), Reduction::Mean), &["parameter"]),
        (|comm, s| comm.broadcast(&upload(s, &[1.0f32; 8]), 0), &["`broadcast`", "`all_reduce`"]),
        (|comm, _| comm.barrier(), &["operation `barrier`"]),
        (
            |comm, s| {
                let x = upload(s, &[1.0f32; 8]);
                let mut sum = SparseSum::new(&x, Sparse::TopK, Keep::Nothing)?;
                sum.run(comm, (&x, &x), 2, Reduction::Sum)
            },
            &["`topk_all_reduce`"],
        ),
    ];
    for (call, words) in odd {
        for (n, rank) in [(3, 0), (3, 1), (5, 4)] {
            let message = format!("rank {rank} has");
            for result in with_odd_one(n, rank, call) {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::Disagreement { .. }), "{error}");
                let error = error.to_string();
                assert!(error.contains(&message), "{error}");
                assert!(words.iter().all(|word| error.contains(word)), "{error}");
            }
        }
    }
}

#[test]
fn who_leaves_or_panics_is_named_at_once() {
    for (n, odd) in [(2, 1), (4, 0)] {
        // After one call, so that the others wait in the second.
        let leaves = |comm: &mut Communicator, stream: &Stream| {
            comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum)
        };
        for (rank, result) in with_odd_one(n, odd, leaves).into_iter().enumerate() {
            if rank == odd {
                result.unwrap();
                continue;
            }
            let error = result.unwrap_err().to_string();
            assert!(error.contains(&format!("rank {odd} is gone: it left the group")), "{error}");
        }
        let group = Communicator::threads(n, &options()).unwrap();
        let errors = on(&open(), group, |mut comm, stream| {
            let me = comm.rank();
            let run = AssertUnwindSafe(move || {
                let x = upload(stream, &[1.0f32; 8]);
                assert!(me != odd, "on purpose");
                comm.all_reduce(&x, Reduction::Sum)
            });
            catch_unwind(run).map(|result| result.unwrap_err().to_string())
        });
        for (rank, error) in errors.into_iter().enumerate() {
            match error {
                Ok(error) => {
                    let expected = format!("rank {odd} is gone: its thread panicked");
                    assert!(rank != odd && error.contains(&expected), "{error}");
                }
                Err(_) => assert_eq!(rank, odd),
            }
        }
    }
}

#[test]
fn who_does_not_come_is_named_after_the_deadline_and_the_group_stays_dead() {
    let options = CommOptions { deadline: Duration::from_millis(50) };
    let group = Communicator::threads(3, &options).unwrap();
    let (tell, told) = std::sync::mpsc::sync_channel(2);
    let told = std::sync::Mutex::new(told);
    let errors = on(&open(), group, |mut comm, stream| {
        let x = upload(stream, &[1.0f32; 8]);
        if comm.rank() == 1 {
            // Comes when the others have given up.
            let told = told.lock().unwrap();
            told.recv().unwrap();
            told.recv().unwrap();
        }
        let first = comm.all_reduce(&x, Reduction::Sum).unwrap_err().to_string();
        if comm.rank() != 1 {
            tell.send(()).unwrap();
        }
        (first, comm.barrier().unwrap_err().to_string())
    });
    for (first, again) in errors {
        assert!(first.contains("`all_reduce`: rank 1 did not come within 0.05 s"), "{first}");
        assert!(again.contains("`barrier`: rank 1 did not come"), "{again}");
    }
}

/// Parcels that do not fit each other, and ranks of different devices.
#[test]
fn what_does_not_fit_is_refused_on_every_rank() {
    let group = Communicator::threads(2, &options()).unwrap();
    let errors = on(&open(), group, |comm, stream| {
        let me = comm.rank();
        let mut link = comm.into_transport();
        let call = Call { operation: "test", dtype: None, count: 0, parameter: 0 };
        let tensor = upload(stream, &vec![1.0f32; 4 + me]);
        let parcel = [Parcel { peer: 1 - me, tensor }];
        match me {
            0 => link.exchange(&call, stream, &parcel, &[]),
            _ => link.exchange(&call, stream, &[], &parcel),
        }
    });
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rank 0 has a message of 4 x f32, the others 5 x f32"), "{error}");
    }
    let group = Communicator::threads(2, &options()).unwrap();
    let errors = on(&open(), group, |mut comm, stream| {
        let own = open().stream("own");
        let stream = if comm.rank() == 1 { &own } else { stream };
        comm.all_reduce(&upload(stream, &[1.0f32; 4]), Reduction::Sum)
    });
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rank 1 has a device of another opening"), "{error}");
    }
}

/// A kernel that panicked before the sum: every rank learns it, here or when it reads the result.
#[test]
fn a_panicked_kernel_reaches_every_rank() {
    let group = Communicator::threads(3, &options()).unwrap();
    let errors = on(&open(), group, |mut comm, stream| {
        let x = upload(stream, &[1.0f32; 4]);
        if comm.rank() == 2 {
            stream.launch("bad").write(&x).run(|_| panic!("on purpose")).unwrap();
        }
        let (input, output, reduction, order) = (&x, &x, Reduction::Sum, Order::Fast);
        let sum = comm.all_reduce_with(&Sum { input, output, reduction, order });
        let error = match sum {
            Ok(()) => x.to_vec::<f32>().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        // Stay until everybody has its answer.
        let _ = comm.barrier();
        error
    });
    for error in errors {
        assert!(error.contains("`bad`") && error.contains("on purpose"), "{error}");
    }
}
