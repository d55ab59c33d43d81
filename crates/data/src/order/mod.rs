//! The order of samples: each env's samples as a pure function of numbers (D2, D4, D6).
//!
//! This order is part of the contract: the gather serves it, `meristem data plan` prints it, and
//! anyone can recompute it.
//!
//! 1. Envs are put into groups that keep their order. With [`EpochMode::Dealt`] a device's envs are
//!    one group; with [`EpochMode::Full`] each env is a separate group.
//! 2. Each group has its own permutation of `0..len` for each epoch. Without `shuffle` it is the
//!    identity. With `shuffle` it is the Fisher–Yates shuffle, from the end, of `0, 1, …, len−1`:
//!    `for i in (1..len).rev() { swap(i, below(i + 1)) }`.
//! 3. The generator is ChaCha with 8 rounds (`rand_chacha::ChaCha8Rng`). Its seed is
//!    `seed_from_u64(seed + 1009 * device_index)`, and its stream is `set_stream(epoch + (rank <<
//!    40))`; both sums wrap. `device_index` is 0 for `cpu` and `cuda`, and k for `cpu:k` and
//!    `cuda:k`. `rank` is the rank of the group's first env among the envs of the device, from 0,
//!    unless [`OrderConfig::ranks`] gives it; with `Dealt` and without parts (rule 8) it is always
//!    0. Each epoch has its own stream, so an epoch is drawn without drawing the epochs before it.
//!    Groups of different ranks have different streams for epochs below 2^40.
//! 4. `below(n)` is Lemire's unbiased draw. With x the generator's next u32 and m = x·n as u64, the
//!    result is the upper half of m. If the lower half of m is less than `2^32 mod n`, x is drawn
//!    again.
//! 5. Batch b of a group is places `b·n .. min((b+1)·n, len)` of the group's permutation, with n =
//!    `batch_per_env` × envs in the group. Each env gets a range of these places, in env order. The
//!    ranges are as equal as possible, the first ones longer (10 over 3 is 4, 3, 3).
//! 6. A group has `len / n` batches, rounded down with `drop_last` and up without. An epoch has as
//!    many batches as the group with the fewest, and at most `max_batches`.
//! 7. In a partial last batch the envs without samples are left out. They must be the last envs;
//!    otherwise the order is refused with [`Error::Hole`](crate::Error::Hole).
//! 8. Envs may have different parts of the dataset ([`OrderConfig::parts`]). Then `len` is the
//!    length of an env's part, and a place of a permutation is a place in that part. With `Dealt`
//!    a device has one group for each part. Every group has its own number of batches, and an epoch
//!    has as many as the group with the most. In each batch the envs without samples are left out,
//!    whichever they are.
//! 9. With `Full`, an env may have its own batch and seed ([`OrderConfig::own`]), which are those
//!    of its group. Every group has its own number of batches, as with parts.
//!
//! So with `Full` an env's order depends only on seed, device and its rank on the device, and with
//! one env on each device both modes are the same.

mod config;
mod epoch_order;
mod plan;
mod shuffle;
mod split;

pub use self::config::{EnvOrder, EpochMode, OrderConfig, OrderPart};
pub use self::epoch_order::EpochOrder;
pub use self::plan::{EpochPlan, OrderPlan, plan};
pub(crate) use self::shuffle::{below, shuffle};
pub use self::split::split_by_seed;
