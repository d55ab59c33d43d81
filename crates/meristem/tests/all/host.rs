//! `meristem host show`.

use crate::common::Meristem;

#[test]
fn a_host_is_shown_as_a_table_and_as_json() {
    let m = Meristem::new();
    let said = m.ok("host show baseline --input 3x32x32").stdout;
    for words in [
        "cnn:channels=8,blocks=3,kernel=3,pools=3",
        "images of 3×32×32, 10 classes: 6,418 parameters, 811,328 multiply-accumulate operations \
         per image, 6 slots",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let row = said.lines().find(|line| line.contains("blocks.1.conv")).unwrap();
    let cells: Vec<&str> = row.split(['│', '┆']).map(str::trim).collect();
    assert_eq!(cells[1..6], ["blocks.1.conv", "conv 3×3", "16×16×16", "1,152", "294,912"]);

    let printed = m.ok("host show baseline --input 3x32x32 --json").stdout;
    let json: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&json["parameters"], &json["macs"]), (&6418.into(), &811_328.into()));
    let slot = &json["layers"][3];
    assert_eq!((&slot["name"], &slot["layer"]), (&"r0c0".into(), &"slot".into()));
    assert_eq!(slot["output"], serde_json::json!([8, 32, 32]));
}

#[test]
fn a_host_that_cannot_be_is_refused() {
    let m = Meristem::new();
    m.fails("host show basline", 2, &["unknown host `basline`", "did you mean `baseline`"]);
    m.fails("host show deep --input 3x4x4", 2, &["too deep for 3×4×4 images"]);
    m.fails("host show deep --input 3x32", 2, &["expected channels, rows and columns"]);
    m.fails("host show deep --input 3x32xa", 2, &["expected channels, rows and columns"]);
    m.fails("host show deep --classes 0", 2, &["`classes` must be"]);
}
