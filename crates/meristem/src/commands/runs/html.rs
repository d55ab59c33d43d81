//! HTML in which text is always escaped.

use crate::plot::escaped;

/// A piece of HTML. Only this module makes one from text, which it escapes.
#[derive(Clone, Debug, Default)]
pub(super) struct Html(String);

/// Style of the page: the colours of the reader's system, and charts that scroll on a phone.
const STYLE: &str = "\
:root{color-scheme:light dark;--grid:#dcdcdc;--back:#fff;--ink:#222;--line:#bbb}
@media(prefers-color-scheme:dark){:root{--grid:#3a3a3a;--back:#16181c;--ink:#e4e4e4;--line:#555}}
body{background:var(--back);color:var(--ink);font:16px/1.45 sans-serif;margin:0 auto;padding:1rem;max-width:60rem}
h1,h2,h3{line-height:1.2;overflow-wrap:anywhere}
h2{border-top:1px solid var(--line);padding-top:1rem;margin-top:2.5rem}
.scroll{overflow-x:auto;margin:.8rem 0}
:focus-visible{outline:3px solid #0072b2;outline-offset:2px}
svg{width:100%;min-width:34rem;height:auto;display:block}
table{border-collapse:collapse}
th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
caption{text-align:left;font-weight:bold;padding:.3rem 0}
summary{cursor:pointer;padding:.3rem 0}
a{color:inherit}
";

impl Html {
    /// Text, with everything escaped that HTML gives a meaning.
    pub(super) fn text(text: &str) -> Self {
        Self(escaped(text))
    }

    /// An element with these attributes, which are constants, and this content.
    pub(super) fn element(tag: &'static str, attributes: &'static str, content: Self) -> Self {
        let space = if attributes.is_empty() { "" } else { " " };
        Self(format!("<{tag}{space}{attributes}>{}</{tag}>\n", content.0))
    }

    /// An element with text only.
    pub(super) fn of(tag: &'static str, text: &str) -> Self {
        Self::element(tag, "", Self::text(text))
    }

    /// A target for links within the page.
    pub(super) fn heading(number: usize, text: &str) -> Self {
        Self(format!("<h2 id=\"run-{number}\">{}</h2>\n", escaped(text)))
    }

    /// A link to a heading.
    pub(super) fn link(number: usize, text: &str) -> Self {
        Self(format!("<a href=\"#run-{number}\">{}</a>", escaped(text)))
    }

    /// A drawing that scrolls if the page is narrow, also by keyboard.
    pub(super) fn picture(svg: String, label: &str) -> Self {
        Self(format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{}\">{svg}</div>\n",
            escaped(label)
        ))
    }

    /// A table with a caption; the first row is the header, the first column names the rows.
    pub(super) fn table(caption: &str, rows: &[Vec<String>]) -> Self {
        let mut body = Self::of("caption", caption);
        for (number, row) in rows.iter().enumerate() {
            let mut cells = Self::default();
            for (column, cell) in row.iter().enumerate() {
                cells.push(match (number, column) {
                    (0, _) => Self::element("th", "scope=\"col\"", Self::text(cell)),
                    (_, 0) => Self::element("th", "scope=\"row\"", Self::text(cell)),
                    _ => Self::of("td", cell),
                });
            }
            body.push(Self::element("tr", "", cells));
        }
        let table = Self::element("table", "", body);
        Self(format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{}\">{}</div>\n",
            escaped(caption),
            table.0
        ))
    }

    /// A part that can be folded.
    pub(super) fn details(title: &str, open: bool, content: Self) -> Self {
        let content = Self(Self::of("summary", title).0 + &content.0);
        Self::element("details", if open { "open" } else { "" }, content)
    }

    pub(super) fn push(&mut self, other: Self) {
        self.0.push_str(&other.0);
    }

    /// The whole page. Its policy forbids scripts and everything from elsewhere.
    pub(super) fn page(title: &str, body: Self) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{}</main>\n\
             </body>\n</html>\n",
            escaped(title),
            body.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_becomes_an_element() {
        let evil = "\"><script>alert('x')</script>";
        let mut body = Html::of("p", evil);
        body.push(Html::heading(1, evil));
        body.push(Html::link(1, evil));
        body.push(Html::table(evil, &[vec![evil.into()], vec![evil.into(), evil.into()]]));
        body.push(Html::details(evil, true, Html::text(evil)));
        body.push(Html::picture(String::new(), evil));
        let page = Html::page(evil, body);
        assert!(!page.contains("<script") && !page.contains("\"><s"), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 12, "{page}");
    }
}
