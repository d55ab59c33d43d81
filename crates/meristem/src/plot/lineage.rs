//! Lineage of members that copied others: a row for each member over the steps, in the colour of
//! the member from which its weights descend.

use std::collections::BTreeMap;

use meristem::train::reading::MemberCopy;

use super::axis::{Axis, Field, x_ticks};
use super::{Anchor, Colour, Picture, SERIES, Shape, series_colour, text};

/// Most rows.
const ROWS_MAX: usize = 64;
/// Height of a row in pixels.
const ROW: f64 = 18.0;
/// Minimum distance in pixels between the ends of two bars of a row. A bar that ends closer is left
/// out, and with it the line from the copied member.
const PIXELS_MIN: f64 = 2.0;

/// Steps of a row in which the weights descend from one member.
struct Descent {
    ancestor: usize,
    from: usize,
    /// The member that was copied at the beginning.
    copied: Option<usize>,
}

/// Draws the first [`ROWS_MAX`] of `members`, given by number and steps of training, and `copies`,
/// in the order of their steps. `None` without copies.
pub(crate) fn lineage<'a>(
    members: &[(usize, usize)],
    copies: impl Iterator<Item = &'a MemberCopy>,
) -> Option<Picture> {
    let rows = &members[..members.len().min(ROWS_MAX)];
    let mut descents: BTreeMap<usize, Vec<Descent>> = BTreeMap::new();
    let own = |member| vec![Descent { ancestor: member, from: 0, copied: None }];
    let mut found = false;
    for MemberCopy { member, from, step } in copies {
        found = true;
        let ancestor = descents.get(from).and_then(|all| all.last()).map_or(*from, |d| d.ancestor);
        let all = descents.entry(*member).or_insert_with(|| own(*member));
        all.push(Descent { ancestor, from: step.saturating_add(1), copied: Some(*from) });
    }
    if !found {
        return None;
    }
    let colours = colours_of(rows, &descents);
    let colour = |ancestor: &usize| colours.get(ancestor).copied().unwrap_or(Colour::Grid);
    let size = [720.0, 70.0 + ROW * rows.len() as f64];
    let field: Field = [90.0, 10.0, size[0] - 20.0, size[1] - 60.0];
    let [left, top, right, bottom] = field;
    let x = Axis::of(rows.iter().map(|(_, steps)| *steps as f64).chain([0.0]), [left, right]);
    let height = |row: usize| top + ROW * (row as f64 + 0.5);
    let row_of: BTreeMap<usize, usize> =
        rows.iter().enumerate().map(|(row, (member, _))| (*member, row)).collect();
    let mut shapes = x_ticks(&x, field);
    for (row, (member, steps)) in rows.iter().enumerate() {
        shapes.push(text([left - 8.0, height(row)], Anchor::End, format!("member {member}")));
        let alone = own(*member);
        let all = descents.get(member).unwrap_or(&alone);
        let mut drawn = f64::NEG_INFINITY;
        for (nth, descent) in all.iter().enumerate() {
            let to = all.get(nth + 1).map_or(*steps, |next| next.from);
            let [from, to] = [descent.from, to].map(|step| x.at(step as f64).min(right));
            if to < drawn + PIXELS_MIN {
                continue;
            }
            drawn = to;
            let colour = colour(&descent.ancestor);
            let parent = descent.copied.and_then(|parent| row_of.get(&parent));
            if let Some(parent) = parent {
                let (from, to) = ([from, height(*parent)], [from, height(row)]);
                shapes.push(Shape::Line { from, to, colour });
            }
            let [above, below] = [height(row) - 4.0, height(row) + 4.0];
            shapes.push(Shape::Area { from: [from, above], to: [to, below], colour });
        }
    }
    let middle = (left + right) / 2.0;
    shapes.push(text([middle, bottom + 40.0], Anchor::Middle, "step".into()));
    Some(Picture { size, shapes })
}

/// Colours of the ancestors, ranked by the number of rows that descend from them at the end. From
/// some rank on, all have the last colour.
fn colours_of(
    rows: &[(usize, usize)],
    descents: &BTreeMap<usize, Vec<Descent>>,
) -> BTreeMap<usize, Colour> {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    for (member, _) in rows {
        let all = descents.get(member);
        let last = all.and_then(|all| all.last()).map_or(*member, |descent| descent.ancestor);
        *counts.entry(last).or_default() += 1;
        for descent in all.into_iter().flatten() {
            counts.entry(descent.ancestor).or_default();
        }
    }
    let mut ranked: Vec<(usize, usize)> = counts.into_iter().collect();
    // Stable: of equal counts the smaller number is first.
    ranked.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let coloured = ranked.into_iter().enumerate();
    coloured
        .map(|(place, (member, _))| (member, series_colour(place.min(SERIES.len() - 1))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn areas(picture: &Picture) -> Vec<(f64, f64, Colour)> {
        let area = |shape: &Shape| match shape {
            Shape::Area { from, to, colour } => Some((from[0], to[0], *colour)),
            _ => None,
        };
        picture.shapes.iter().filter_map(area).collect()
    }

    /// Member 1 copies 0 after step 2 of 10, and 2 copies 1 after step 4: all three descend from 0;
    /// member 3 does not.
    #[test]
    fn rows_have_the_colour_of_their_ancestor() {
        let copies = [(1, 0, 2), (2, 1, 4)];
        let copies = copies.map(|(member, from, step)| MemberCopy { member, from, step: step - 1 });
        let members = [(0, 10), (1, 10), (2, 10), (3, 10)];
        let picture = lineage(&members, copies.iter()).unwrap();
        // 0 to 10 steps are 90 to 700 pixels.
        let [zero, three, one, two] = [0, 1, 2, 3].map(series_colour);
        let expected = [
            (90.0, 700.0, zero),
            (90.0, 212.0, one),
            (212.0, 700.0, zero),
            (90.0, 334.0, two),
            (334.0, 700.0, zero),
            (90.0, 700.0, three),
        ];
        assert_eq!(areas(&picture), expected);
        // A line from the copied row to the copy.
        let heights = picture.shapes.iter().filter_map(|shape| match shape {
            Shape::Line { from, to, colour } if *colour == zero => Some((from[1], to[1])),
            _ => None,
        });
        assert_eq!(heights.collect::<Vec<_>>(), [(19.0, 37.0), (37.0, 55.0)]);
        assert!(lineage(&members, [].iter()).is_none());
    }

    #[test]
    fn a_long_history_of_many_members_is_bounded() {
        let copy = |n: usize| MemberCopy { member: n % 4000, from: (n * 7) % 10_000, step: n / 8 };
        let copies: Vec<MemberCopy> = (0..60_000).map(copy).collect();
        let members: Vec<(usize, usize)> = (0..10_000).map(|n| (n, 7500)).collect();
        let picture = lineage(&members, copies.iter()).unwrap();
        let most = ROWS_MAX * (610 / PIXELS_MIN as usize) * 2;
        assert!(picture.shapes.len() < most, "{}", picture.shapes.len());
        let damaged = [MemberCopy { member: usize::MAX, from: 5, step: usize::MAX }];
        assert!(lineage(&members, damaged.iter()).is_some());
        assert!(lineage(&[], damaged.iter()).is_some());
    }
}
