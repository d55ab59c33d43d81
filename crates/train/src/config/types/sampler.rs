//! Sampling of members from a search space.

use std::fmt;
use std::str::FromStr;

use meristem_device::random::{Purpose, Rng};
use serde::{Deserialize, Serialize};

use super::choice::choice;
use super::{Member, Members, Space};
use crate::config::text::{BadValue, choose, serde_as_text};
use crate::config::value::value_as_text;

/// Most dimensions of a Sobol sequence.
const SOBOL_DIMENSIONS: usize = sobol_burley::NUM_DIMENSIONS as usize;

/// Method of drawing members from a space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Sampler {
    /// Independent draws. The first members stay the same when there are more.
    #[default]
    Random,
    /// An Owen-scrambled Sobol sequence, which covers the space evenly (Burley, "Practical
    /// Hash-based Owen Scrambling", JCGT 2020). The first members stay the same when there are
    /// more.
    Sobol,
    /// The program that trains the members chooses the settings of each when it begins
    /// ([`Searcher`](crate::external::Searcher)).
    External,
}

choice!(Sampler: "random" => Random, "sobol" => Sobol, "external" => External);

impl Sampler {
    /// Draws `count` members from `space`: a pure function of its arguments.
    ///
    /// # Errors
    /// Too many members, or too many dimensions for a Sobol sequence.
    pub(crate) fn draw(self, space: &Space, count: usize, seed: u64) -> Result<Members, BadValue> {
        let dimensions = space.dimensions().len();
        if self == Self::Sobol && dimensions > SOBOL_DIMENSIONS {
            let expected = format!("at most {SOBOL_DIMENSIONS} settings with sampler sobol");
            return Err(BadValue::new(&dimensions.to_string(), expected));
        }
        if self == Self::External {
            // The program chooses the settings of each member when the member begins.
            return Members::new(vec![Member::default(); count]);
        }
        let scramble = Rng::new(seed, Purpose::Members, u64::MAX, 0).next_u32();
        let member = |nth: usize| {
            space.member(|dimension| match self {
                Self::Random => {
                    let key = (nth as u64, dimension as u64);
                    f64::from(Rng::new(seed, Purpose::Members, key.0, key.1).uniform())
                }
                Self::Sobol | Self::External => {
                    f64::from(sobol_burley::sample(nth as u32, dimension as u32, scramble))
                }
            })
        };
        Members::new((0..count).map(member).collect::<Result<_, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(sampler: Sampler, count: usize, seed: u64) -> Vec<f64> {
        let space: Space = "lr=uniform:0,1; momentum=uniform:0,0.9".parse().unwrap();
        let members = sampler.draw(&space, count, seed).unwrap();
        members.all().iter().map(|member| member.get("lr").unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn draws_depend_on_the_seed_and_not_on_their_number() {
        for sampler in [Sampler::Random, Sampler::Sobol] {
            let few = rates(sampler, 8, 3);
            assert_eq!(few, rates(sampler, 40, 3)[..8], "{sampler}");
            assert_ne!(few, rates(sampler, 8, 4), "{sampler}");
        }
    }

    /// The first 64 points of a Sobol sequence have one in each of 64 equal intervals. (Rounding to
    /// four digits moves none of them across a border, for this seed.)
    #[test]
    fn a_sobol_sequence_covers_each_interval_once() {
        let mut counts = [0; 64];
        rates(Sampler::Sobol, 64, 3).iter().for_each(|x| counts[(x * 64.0) as usize] += 1);
        assert_eq!(counts, [1; 64]);
        let mut random = [0; 64];
        rates(Sampler::Random, 64, 3).iter().for_each(|x| random[(x * 64.0) as usize] += 1);
        assert_ne!(random, [1; 64]);
    }
}
