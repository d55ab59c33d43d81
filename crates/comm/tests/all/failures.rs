//! A rank that dies or disagrees ends all other ranks, with an error that names it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use meristem_comm::{
    CollectiveCall, CommOptions, Communicator, Error, Exchange, ExchangeOptions, FeedbackMode,
    Parcel, Reduction, Result, SparseMethod, SparseSum, Sum, SumOrder,
};
use meristem_device::{DType, MemoryFormat, Owner, Stream, Tensor};

use crate::common::{assert_panic_of, on, open, options, upload};

/// Runs `odd` on one rank and `usual` on all others. Returns all results.
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
fn a_differing_call_is_named_on_every_rank() {
    type Odd = fn(&mut Communicator, &Stream) -> Result<()>;
    let sum = |comm: &mut Communicator, stream: &Stream| {
        comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum)
    };
    sum(&mut Communicator::threads(1, &options()).unwrap().remove(0), &open().stream("s")).unwrap();
    let odd: [(Odd, &[&str]); 7] = [
        (
            |comm, s| comm.all_reduce(&upload(s, &[1.0f32; 8]).view(0, [2, 4])?, Reduction::Sum),
            &["rank", "has shape [2, 4], the others [8]"],
        ),
        (|comm, s| comm.all_reduce(&upload(s, &[1.0f32; 7]), Reduction::Sum), &["count 7", "8"]),
        (|comm, s| comm.all_reduce(&upload(s, &[1.0f64; 8]), Reduction::Sum), &["type f64", "f32"]),
        (|comm, s| comm.all_reduce(&upload(s, &[1.0f32; 8]), Reduction::Mean), &["parameter"]),
        (|comm, s| comm.broadcast(&upload(s, &[1.0f32; 8]), 0), &["`broadcast`", "`all_reduce`"]),
        (|comm, _| comm.barrier(), &["operation `barrier`"]),
        (
            |comm, s| {
                let x = upload(s, &[1.0f32; 8]);
                let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Nothing)?;
                sum.run(comm, &x, &x, 2, Reduction::Sum)
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
fn a_rank_that_leaves_or_panics_is_named_at_once() {
    for (n, odd) in [(2, 1), (4, 0)] {
        // After one call, so that the other ranks wait in the second.
        let leaves = |comm: &mut Communicator, stream: &Stream| {
            comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum)
        };
        for (rank, result) in with_odd_one(n, odd, leaves).into_iter().enumerate() {
            if rank == odd {
                result.unwrap();
                continue;
            }
            let error = result.unwrap_err();
            assert!(matches!(error, Error::RankGone { rank, .. } if rank == odd), "{error:?}");
            assert!(error.to_string().contains("is gone: it left the group"), "{error}");
        }
        let group = Communicator::threads(n, &options()).unwrap();
        let errors = on(&open(), group, |mut comm, stream| {
            let me = comm.rank();
            let run = AssertUnwindSafe(move || {
                let x = upload(stream, &[1.0f32; 8]);
                assert!(me != odd, "on purpose");
                comm.all_reduce(&x, Reduction::Sum)
            });
            catch_unwind(run).map(Result::unwrap_err)
        });
        for (rank, error) in errors.into_iter().enumerate() {
            match error {
                Ok(error) => {
                    assert!(matches!(error, Error::RankGone { rank, .. } if rank == odd));
                    assert!(error.to_string().contains("is gone: its thread panicked"), "{error}");
                    assert_ne!(rank, odd);
                }
                Err(_) => assert_eq!(rank, odd),
            }
        }
    }
}

#[test]
fn a_missing_rank_is_named_at_the_deadline_and_the_group_stays_unusable() {
    let options = CommOptions { deadline: Duration::from_millis(50) };
    let group = Communicator::threads(3, &options).unwrap();
    let (tell, told) = std::sync::mpsc::sync_channel(2);
    let told = std::sync::Mutex::new(told);
    let errors = on(&open(), group, |mut comm, stream| {
        let x = upload(stream, &[1.0f32; 8]);
        if comm.rank() == 1 {
            // Arrives after the other ranks have given up.
            let told = told.lock().unwrap();
            told.recv().unwrap();
            told.recv().unwrap();
        }
        let first = comm.all_reduce(&x, Reduction::Sum).unwrap_err();
        if comm.rank() != 1 {
            tell.send(()).unwrap();
        }
        (first, comm.barrier().unwrap_err())
    });
    for (first, again) in errors {
        for (error, words) in [
            (first, "`all_reduce`: rank 1 did not arrive within 0.05 s"),
            (again, "`barrier`: rank 1 did not arrive within 0.05 s"),
        ] {
            assert!(matches!(error, Error::RankLate { rank: 1, .. }), "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

/// An error of one rank alone reaches the other ranks at once, with its text. The rank is still
/// alive but makes no more calls.
#[test]
fn an_error_of_one_rank_reaches_the_others() {
    type Fails = fn(&mut Communicator, &Stream) -> Result<()>;
    let fails: [(Fails, &str); 7] = [
        (|comm, s| comm.all_reduce(&upload(s, &[1u32; 8]), Reduction::Sum), "got u32"),
        (|comm, s| comm.broadcast(&upload(s, &[1.0f32; 8]), 9), "`root` must be below 3"),
        (
            |comm, s| comm.all_gather(&upload(s, &[1.0f32; 8]), &upload(s, &[1.0f32; 8])),
            "must be 3 x 8 elements, got 8",
        ),
        (
            |comm, s| {
                let (input, output) = (&upload(s, &[1.0f32; 8]), &upload(s, &[1.0f32; 7]));
                let (reduction, order) = (Reduction::Sum, SumOrder::Rank);
                comm.all_reduce_with(&Sum { input, output, reduction, order })
            },
            "`output` must be of shape [8], got [7]",
        ),
        (
            |comm, s| {
                let x = upload(s, &[1.0f32; 8]);
                let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Nothing)?;
                sum.run(comm, &x, &x, 9, Reduction::Sum)
            },
            "got 9",
        ),
        (
            |comm, s| {
                let (x, y) = (upload(s, &[1.0f32; 8]), upload(s, &[1.0f32; 7]));
                let mut exchange = Exchange::new(&ExchangeOptions::default(), &[("x", &x)])?;
                exchange.run(comm, &[&y])
            },
            "`x` must be of 8 elements, got 7",
        ),
        (
            |comm, s| {
                // A failed stream accepts no launch.
                let x = upload(s, &[1.0f32; 8]);
                let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Residual)?;
                s.launch("bad").write(&x).run(|_| panic!("on purpose"))?;
                let error = s.synchronize().unwrap_err();
                assert!(matches!(error, meristem_device::Error::KernelPanicked { .. }), "{error}");
                sum.run(comm, &x, &x, 2, Reduction::Sum)
            },
            "on purpose",
        ),
    ];
    for (call, words) in fails {
        let (hear, heard) = std::sync::mpsc::sync_channel(2);
        let heard = std::sync::Mutex::new(heard);
        let errors =
            on(&open(), Communicator::threads(3, &options()).unwrap(), |mut comm, stream| {
                let me = comm.rank();
                let first = if me == 1 {
                    call(&mut comm, stream).unwrap_err()
                } else {
                    let x = upload(stream, &[1.0f32; 8]);
                    comm.all_reduce(&x, Reduction::Sum).unwrap_err()
                };
                // This rank leaves only after the other ranks have the error.
                match me {
                    1 => (0..2).for_each(|_| heard.lock().unwrap().recv().unwrap()),
                    _ => hear.send(()).unwrap(),
                }
                (first, comm.barrier().unwrap_err())
            });
        let of_another = |error: &Error| matches!(error, Error::RankFailed { rank: 1, .. });
        for (rank, (first, again)) in errors.iter().enumerate() {
            assert_eq!(of_another(first), rank != 1, "{first:?}");
            assert!(of_another(again), "{again:?}");
            for text in [first, again].map(ToString::to_string) {
                assert!(text.contains(words), "{words}: {text}");
            }
        }
    }
}

/// An error of any length is passed on.
#[test]
fn a_deadline_may_be_unlimited() {
    let options = CommOptions { deadline: Duration::MAX };
    let group = Communicator::threads(2, &options).unwrap();
    on(&open(), group, |mut comm, stream| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
        }
        comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum).unwrap();
    });
}

#[test]
fn mismatched_parcels_fail_on_every_rank() {
    let group = Communicator::threads(2, &options()).unwrap();
    let errors = on(&open(), group, |comm, stream| {
        let me = comm.rank();
        let mut link = comm.into_transport();
        let call = CollectiveCall::new("test");
        let tensor = upload(stream, &vec![1.0f32; 4 + me]);
        let parcel = [Parcel::new(1 - me, &tensor).unwrap()];
        match me {
            0 => link.exchange(&call, stream, &parcel, &[]),
            _ => link.exchange(&call, stream, &[], &parcel),
        }
    });
    for error in errors {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Disagreement { rank: 0, .. }), "{error:?}");
        let words = "has a message of 4 x f32, the others 5 x f32";
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// With another memory order on one rank, elements of different positions would be added.
#[test]
fn another_memory_format_is_named() {
    type CollectiveCall = fn(&mut Communicator, &Tensor) -> Result<()>;
    let calls: [CollectiveCall; 4] = [
        |comm, x| comm.all_reduce(x, Reduction::Sum),
        |comm, x| comm.broadcast(x, 0),
        |comm, x| {
            let [n, c, h, w] = [x.dims()[0], 3, 4, 5];
            let all = [comm.size() * n, c, h, w];
            let (dtype, format, owner) = (x.dtype(), x.format(), Owner::Other);
            let all = Tensor::zeros_with_format(x.stream(), all, dtype, format, owner)?;
            comm.all_gather(x, &all)
        },
        |comm, x| {
            let mut sum = SparseSum::new(x, SparseMethod::TopK, FeedbackMode::Nothing)?;
            sum.run(comm, x, x, 2, Reduction::Sum)
        },
    ];
    let on_ranks = |call: CollectiveCall, dims: [usize; 4]| {
        on(&open(), Communicator::threads(3, &options()).unwrap(), |mut comm, stream| {
            let odd = comm.rank() == 1;
            let format = if odd { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
            let (dtype, owner) = (DType::F32, Owner::Other);
            let x = Tensor::zeros_with_format(stream, dims, dtype, format, owner).unwrap();
            call(&mut comm, &x)
        })
    };
    for call in calls {
        for result in on_ranks(call, [2, 3, 4, 5]) {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Disagreement { rank: 1, .. }), "{error:?}");
            let words = "has memory format channels last, the others contiguous";
            assert!(error.to_string().contains(words), "{error}");
        }
    }
    // With one pixel both formats have the same order.
    on_ranks(calls[0], [2, 3, 1, 1]).into_iter().for_each(|result| result.unwrap());
}

/// After a kernel panicked before the sum, every rank gets the error, in the sum or when it reads
/// the result.
#[test]
fn a_panicked_kernel_reaches_every_rank() {
    let group = Communicator::threads(3, &options()).unwrap();
    let errors = on(&open(), group, |mut comm, stream| {
        let x = upload(stream, &[1.0f32; 4]);
        if comm.rank() == 2 {
            stream.launch("bad").write(&x).run(|_| panic!("on purpose")).unwrap();
        }
        let (input, output, reduction, order) = (&x, &x, Reduction::Sum, SumOrder::Fast);
        let sum = comm.all_reduce_with(&Sum { input, output, reduction, order });
        let error = match sum {
            Ok(()) => Error::from(x.to_vec::<f32>().unwrap_err()),
            Err(error) => error,
        };
        // Stays until every rank has its answer.
        let _ = comm.barrier();
        error
    });
    assert_panic_of(2, &errors, &["`bad`", "on purpose"]);
}
