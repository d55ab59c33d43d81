//! Events of a run as tables with one column per key.

use meristem_nn::ScoreKind;
use meristem_train::reading::EventLine;
use meristem_train::{Event, name_scores};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::dlpack::Array;
use crate::json::to_python;

/// Keys of an event that are copied to the rows of its lists.
const POSITION: [&str; 3] = ["env", "round", "step"];

/// Tables by name, in the order of their first rows.
#[derive(Default)]
pub(crate) struct Tables {
    all: Vec<(String, Table)>,
    /// Kind of the run's scores.
    score: ScoreKind,
}

/// Columns by name, of equal length.
#[derive(Default)]
struct Table {
    rows: usize,
    columns: Vec<(String, Vec<Value>)>,
}

impl Tables {
    /// Adds an event as a row of the table of its kind. An object becomes several columns; a list
    /// of objects becomes rows of a separate table, such as `step_completed.slots`.
    pub(crate) fn add(&mut self, line: &EventLine) {
        if let Event::RunStarted(started) = &line.event {
            self.score = started.task.score();
        }
        let named = |text: String| serde_json::from_str(&name_scores(text, self.score));
        let event = serde_json::to_string(&line.event).and_then(named);
        let Ok(Value::Object(mut event)) = event else { return };
        let Some(Value::String(name)) = event.remove("event") else { return };
        let mut row = vec![
            ("seq".to_string(), Value::from(line.seq)),
            ("seconds".to_string(), Value::from(line.seconds)),
        ];
        let position = POSITION.iter().filter_map(|key| Some((*key, event.get(*key)?.clone())));
        let position: Vec<(String, Value)> =
            position.map(|(key, value)| (key.to_string(), value)).collect();
        let mut lists = vec![];
        flatten("", event, &mut row, &mut lists);
        self.table(&name).push(row);
        for (key, items) in lists {
            for item in items {
                let mut row = position.clone();
                flatten("", item, &mut row, &mut vec![]);
                self.table(&format!("{name}.{key}")).push(row);
            }
        }
    }

    fn table(&mut self, name: &str) -> &mut Table {
        let at = self.all.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            self.all.push((name.into(), Table::default()));
            self.all.len() - 1
        });
        &mut self.all[at].1
    }

    /// A dictionary of tables, each a dictionary of columns.
    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let tables = PyDict::new(py);
        for (name, table) in self.all {
            let columns = PyDict::new(py);
            for (key, mut values) in table.columns {
                values.resize(table.rows, Value::Null);
                columns.set_item(key, column(py, &values)?)?;
            }
            tables.set_item(name, columns)?;
        }
        Ok(tables)
    }
}

impl Table {
    fn push(&mut self, row: Vec<(String, Value)>) {
        for (key, value) in row {
            let at = self.columns.iter().position(|(known, _)| *known == key);
            let at = at.unwrap_or_else(|| {
                self.columns.push((key, vec![]));
                self.columns.len() - 1
            });
            let values = &mut self.columns[at].1;
            // Previous events lack the key.
            values.resize(self.rows, Value::Null);
            values.push(value);
        }
        self.rows += 1;
    }
}

/// An object in a list of an event.
type Item = Map<String, Value>;

/// Adds the values of `from` to `row`, with the keys of nested objects joined by `_`. Lists of
/// objects go to `lists`.
fn flatten(
    prefix: &str,
    from: Item,
    row: &mut Vec<(String, Value)>,
    lists: &mut Vec<(String, Vec<Item>)>,
) {
    for (key, value) in from {
        let key = format!("{prefix}{key}");
        match value {
            Value::Object(inner) => flatten(&format!("{key}_"), inner, row, lists),
            Value::Array(items) if items.first().is_some_and(Value::is_object) => {
                let object = |item| match item {
                    Value::Object(item) => Some(item),
                    _ => None,
                };
                lists.push((key, items.into_iter().filter_map(object).collect()));
            }
            value => row.push((key, value)),
        }
    }
}

/// Converts a column to an array of int64, float64 (with NaN for null) or bool, or else to a list.
fn column(py: Python<'_>, values: &[Value]) -> PyResult<Py<PyAny>> {
    let array = if values.iter().all(Value::is_i64) {
        Array::of(values.iter().filter_map(Value::as_i64).collect::<Vec<_>>())
    } else if values.iter().all(|value| value.is_number() || value.is_null()) {
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        Array::of(values.iter().map(number).collect::<Vec<_>>())
    } else if values.iter().all(Value::is_boolean) {
        Array::of(values.iter().filter_map(Value::as_bool).collect::<Vec<_>>())
    } else {
        return to_python(py, &values);
    };
    Ok(Py::new(py, array)?.into_any())
}
