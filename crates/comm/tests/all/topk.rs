//! X9: the largest elements of one tensor and of all ranks' tensors, selected or given, against
//! sorting.

use half::bf16;
use meristem_comm::{
    Communicator, Error, PhaseMemory, SumElement, TopKElements, TopKStorage, topk, topk_all_gather,
    topk_all_gather_measured,
};
use meristem_device::{Counts, Stream, Tensor};

use crate::common::{RANKS, assert_panic_of, nan, noise, on, open, options, ranks, upload};

/// Irregular numbers, with equal magnitudes, NaN and infinities.
fn values<T: SumElement>(len: usize, rank: usize) -> Vec<T> {
    let special = [f64::NAN, f64::NEG_INFINITY, 0.0, -0.0, 1.0, 1.0];
    let number = |(i, x): (usize, f32)| match i % 37 {
        0 => special[(i / 37 + rank) % special.len()],
        _ => f64::from(x),
    };
    noise(len, rank, 0).into_iter().enumerate().map(number).map(T::from_f64).collect()
}

/// Indices of the k largest elements, in order.
fn largest<T: SumElement>(values: &[T], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(values[i as usize].magnitude()));
    order.truncate(k);
    order.sort_unstable();
    order
}

/// Indices and bits.
fn seen<T: SumElement>(picked: &TopKElements) -> (Vec<u32>, Vec<u8>) {
    let values = picked.values.to_vec::<T>().unwrap();
    (picked.indices.to_vec().unwrap(), bytemuck::cast_slice(&values).to_vec())
}

fn expected<T: SumElement>(all: &[(Vec<T>, Vec<u32>)]) -> (Vec<u32>, Vec<u8>) {
    let indices = all.iter().flat_map(|(_, places)| places.clone()).collect();
    let at = |(values, places): &(Vec<T>, Vec<u32>)| -> Vec<T> {
        places.iter().map(|place| values[*place as usize]).collect()
    };
    let values: Vec<T> = all.iter().flat_map(at).collect();
    (indices, bytemuck::cast_slice(&values).to_vec())
}

fn check<T: SumElement>(n: usize, len: usize, k_max: usize) {
    let results = ranks(n, |mut comm, stream| {
        let me = comm.rank();
        let x = upload(stream, &values::<T>(len, me));
        let mut storage = TopKStorage::new(&x, n, k_max).unwrap();
        let mut results = vec![];
        for k in [0, k_max.min(1), k_max / 2, k_max] {
            let alone = topk(&x, &mut storage, k).unwrap();
            assert_eq!(alone.values.dims(), [k]);
            let own = (values::<T>(len, me), largest(&values::<T>(len, me), k));
            assert_eq!(seen::<T>(&alone), expected(&[own]), "rank {me}, {k} of {len}");
            // The indices may be from an earlier selection, in this storage or another.
            let given = topk(&x, &mut TopKStorage::new(&x, 1, k).unwrap(), k).unwrap().indices;
            for indices in [None, Some(&given), Some(&alone.indices)] {
                // The front of the storage is the row of rank 0.
                let again = topk(&x, &mut storage, k).unwrap();
                assert_eq!(again.indices.address(), alone.indices.address());
                let all = topk_all_gather(&mut comm, &x, &mut storage, indices, k).unwrap();
                assert_eq!((all.values.dims(), all.indices.dims()), (&[n * k][..], &[n * k][..]));
                results.push((k, seen::<T>(&all)));
            }
        }
        results
    });
    for (k, got) in results.into_iter().flatten() {
        let of = |rank: usize| (values::<T>(len, rank), largest(&values::<T>(len, rank), k));
        let all: Vec<_> = (0..n).map(of).collect();
        assert!(got == expected(&all), "{n} ranks, {k} of {len}");
    }
}

#[test]
fn top_k_of_all_ranks_in_rank_order() {
    for n in RANKS {
        for (len, k_max) in [(0, 0), (1, 1), (7, 7), (5000, 50), (5000, 5000)] {
            check::<f32>(n, len, k_max);
        }
    }
    check::<f64>(3, 1000, 20);
    check::<bf16>(3, 1000, 20);
}

/// A rank may choose its own elements, in any order and repeatedly.
#[test]
fn indices_may_be_given() {
    let results = ranks(3, |mut comm, stream| {
        let me = comm.rank();
        let x = upload(stream, &noise(100, me, 1));
        let mut storage = TopKStorage::new(&x, 3, 4).unwrap();
        let own = upload(stream, &[99 - me as u32, 5, 5, me as u32]);
        let given = (me != 1).then_some(&own);
        seen::<f32>(&topk_all_gather(&mut comm, &x, &mut storage, given, 4).unwrap())
    });
    let places = |rank: usize| match rank {
        1 => largest(&noise(100, 1, 1), 4),
        _ => vec![99 - rank as u32, 5, 5, rank as u32],
    };
    let all: Vec<_> = (0..3).map(|rank| (noise(100, rank, 1), places(rank))).collect();
    results.iter().for_each(|got| assert_eq!(*got, expected(&all)));
}

/// A gather allocates its storage, and nothing afterwards (V3).
#[test]
fn a_gather_is_measured_phase_by_phase() {
    let results = ranks(3, |mut comm, stream| {
        let x = upload(stream, &noise(1000, comm.rank(), 0));
        let mut storage = TopKStorage::new(&x, 3, 20).unwrap();
        let plain = topk_all_gather(&mut comm, &x, &mut storage, None, 20).unwrap();
        let (measured, phases) = topk_all_gather_measured(&mut comm, &x, 20).unwrap();
        assert_eq!(seen::<f32>(&measured), seen::<f32>(&plain));
        phases
    });
    let PhaseMemory { before, allocation, selection, collective, peak } = results[0];
    // Three ranks with room for the values and indices of all.
    assert!(allocation >= before + 3 * 3 * 20 * 8, "{results:?}");
    assert_eq!([selection, collective, peak], [allocation; 3], "{results:?}");
    assert!(results.iter().all(|phases| *phases == results[0]), "{results:?}");
}

/// A rank that cannot make its storage does not leave the others waiting.
#[test]
fn a_storage_that_one_rank_cannot_make_fails_the_call_of_all() {
    let errors = ranks(2, |mut comm, stream| {
        let x = upload(stream, &noise(100, comm.rank(), 0));
        let k = 100 + comm.rank();
        let result = TopKStorage::for_group(&mut comm, &x, k);
        let mut storage = match result {
            Ok(storage) => storage,
            Err(error) => return error,
        };
        topk_all_gather(&mut comm, &x, &mut storage, None, k).unwrap_err()
    });
    assert!(matches!(&errors[1], Error::BadArgument { argument, .. } if argument == "k"));
    assert!(errors[0].to_string().contains("rank 1"), "{}", errors[0]);
}

/// Payloads that rise with the index: by payload the last NaN would be the largest.
fn nans_go_by_index<T: SumElement>() {
    let mut values: Vec<T> = noise(6000, 0, 0).iter().map(|x| T::from_f64((*x).into())).collect();
    values[3] = T::from_f64(f64::NEG_INFINITY);
    let places: Vec<u32> = (0..40).map(|i| 100 + 90 * i).collect();
    places.iter().enumerate().for_each(|(i, place)| values[*place as usize] = nan(i));
    let results = ranks(1, |_, stream| {
        let x = upload(stream, &values);
        let mut storage = TopKStorage::new(&x, 1, 41).unwrap();
        [1, 7, 40, 41].map(|k| seen::<T>(&topk(&x, &mut storage, k).unwrap()))
    });
    for (k, got) in [1, 7, 40, 41].into_iter().zip(&results[0]) {
        let first = [&[3], &places[..]].concat();
        let wanted = if k == 41 { first } else { places[..k].to_vec() };
        assert!(*got == expected(&[(values.clone(), wanted)]), "{k} of {got:?}");
    }
}

#[test]
fn every_nan_is_the_largest_whatever_its_payload() {
    nans_go_by_index::<f32>();
    nans_go_by_index::<f64>();
    nans_go_by_index::<bf16>();
}

#[test]
fn storage_is_allocated_once_and_only_lists_are_sent() {
    let (n, k) = (4, 30);
    let device = open();
    let group = Communicator::threads(n, &options()).unwrap();
    on(&device, group, |mut comm, stream| {
        let x = upload(stream, &noise(4000, comm.rank(), 0));
        let mut storage = TopKStorage::new(&x, n, k).unwrap();
        assert_eq!(storage.k_max(), k);
        comm.barrier().unwrap();
        let before = device.counts();
        comm.barrier().unwrap();
        for k in [k, 7, k] {
            topk_all_gather(&mut comm, &x, &mut storage, None, k).unwrap();
        }
        comm.barrier().unwrap();
        let after = device.counts();
        let counted = |counts: Counts| (counts.allocations, counts.synchronizations);
        assert_eq!(counted(after), counted(before));
        // An index and a value have 8 bytes.
        assert_eq!(comm.traffic().sent_bytes, (8 * (2 * k + 7) * (n - 1)) as u64);
        comm.barrier().unwrap();
    });
}

/// The result of one rank's call.
fn gather(comm: &mut Communicator, stream: &Stream, indices: &[u32], k: usize) -> Option<Error> {
    let x = upload(stream, &[1.0f32, 2.0, 3.0]);
    let mut storage = TopKStorage::new(&x, comm.size(), 2).unwrap();
    let indices: Option<Tensor> = (!indices.is_empty()).then(|| upload(stream, indices));
    let picked = topk_all_gather(comm, &x, &mut storage, indices.as_ref(), k);
    picked.and_then(|picked| Ok(picked.values.to_vec::<f32>().map(drop)?)).err()
}

#[test]
fn a_rank_with_another_k_is_named() {
    let errors = ranks(3, |mut comm, stream| {
        let k = if comm.rank() == 1 { 1 } else { 2 };
        gather(&mut comm, stream, &[], k).unwrap()
    });
    for error in errors {
        assert!(matches!(error, Error::Disagreement { rank: 1, .. }), "{error:?}");
        let words = "`topk_all_gather`: rank 1 has parameter 1, the others 2";
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// An index outside the tensor is detected on the device; on the CPU as a panic. The other ranks
/// get the panic with their results, or, if the call of the rank returned it, as its failure.
#[test]
fn an_index_out_of_bounds_is_a_panic() {
    let errors = ranks(3, |mut comm, stream| {
        let indices = if comm.rank() == 1 { [0, 3] } else { [0, 2] };
        let error = gather(&mut comm, stream, &indices, 2);
        // Stays until every rank has its answer.
        let _ = comm.barrier();
        error.unwrap()
    });
    assert_panic_of(1, &errors, &["`topk, take`", "index 3 of a tensor of 3 elements"]);
}
