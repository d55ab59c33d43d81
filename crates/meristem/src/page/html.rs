//! HTML builder that escapes all text.

use meristem::export::drawing::escaped;

/// A piece of HTML. Only this module creates one from text, with escaping.
#[derive(Clone, Debug, Default)]
pub(crate) struct Html(String);

/// Maximum length of a cell's text that is shown without line breaks.
const LONG: usize = 32;

/// Style of all pages.
pub(crate) const STYLE: &str = include_str!("style.css");

impl Html {
    /// Text, with HTML's special characters escaped.
    pub(crate) fn text(text: &str) -> Self {
        Self(escaped(text))
    }

    /// An element with `attributes`, which are constants, and `content`.
    pub(crate) fn element(tag: &'static str, attributes: &'static str, content: Self) -> Self {
        let space = if attributes.is_empty() { "" } else { " " };
        Self(format!("<{tag}{space}{attributes}>{}</{tag}>\n", content.0))
    }

    /// An element with text only.
    pub(crate) fn of(tag: &'static str, text: &str) -> Self {
        Self::element(tag, "", Self::text(text))
    }

    /// A heading that is a target of [`Html::link`].
    pub(crate) fn heading(number: usize, text: &str) -> Self {
        Self(format!("<h2 id=\"run-{number}\">{}</h2>\n", escaped(text)))
    }

    /// A link to the heading with this number.
    pub(crate) fn link(number: usize, text: &str) -> Self {
        Self(format!("<a href=\"#run-{number}\">{}</a>", escaped(text)))
    }

    /// A drawing that scrolls on a narrow page, also by keyboard.
    pub(crate) fn picture(svg: String, label: &str) -> Self {
        Self(format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{}\">{svg}</div>\n",
            escaped(label)
        ))
    }

    /// A table with a caption. The first row is the header, the first column has the names of the
    /// rows.
    pub(crate) fn table(caption: &str, rows: &[Vec<String>]) -> Self {
        let cell = |text: &String| {
            if text.chars().count() > LONG {
                Self::element("span", "class=\"long\"", Self::text(text))
            } else {
                Self::text(text)
            }
        };
        let cells = |row: &Vec<String>| row.iter().map(cell).collect();
        Self::table_of(caption, rows.iter().map(cells).collect())
    }

    /// Like [`Html::table`], with HTML in the cells.
    pub(crate) fn table_of(caption: &str, rows: Vec<Vec<Self>>) -> Self {
        let mut body = Self::of("caption", caption);
        for (number, row) in rows.into_iter().enumerate() {
            let mut cells = Self::default();
            for (column, cell) in row.into_iter().enumerate() {
                cells.push(match (number, column) {
                    (0, _) => Self::element("th", "scope=\"col\"", cell),
                    (_, 0) => Self::element("th", "scope=\"row\"", cell),
                    _ => Self::element("td", "", cell),
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
    pub(crate) fn details(title: &str, open: bool, content: Self) -> Self {
        let content = Self(Self::of("summary", title).0 + &content.0);
        Self::element("details", if open { "open" } else { "" }, content)
    }

    /// A link to a URL of this server.
    #[cfg(feature = "serve")]
    pub(crate) fn anchor(url: &str, text: &str) -> Self {
        Self(format!("<a href=\"{}\">{}</a>", escaped(url), escaped(text)))
    }

    /// A form whose fields become the query of a URL of this server.
    #[cfg(feature = "serve")]
    pub(crate) fn form(url: &str, content: Self) -> Self {
        let url = escaped(url);
        Self(format!("<form action=\"{url}\" method=\"get\">{}</form>\n", content.0))
    }

    /// A checkbox with a label for screen readers.
    #[cfg(feature = "serve")]
    pub(crate) fn checkbox(name: &'static str, value: &str, label: &str) -> Self {
        let [value, label] = [value, label].map(escaped);
        Self(format!(
            "<input type=\"checkbox\" name=\"{name}\" value=\"{value}\" aria-label=\"{label}\">"
        ))
    }

    /// A part of a page with its name and the hash of its content.
    #[cfg(feature = "serve")]
    pub(crate) fn section(id: &str, hash: &str, content: Self) -> Self {
        let [id, hash] = [id, hash].map(escaped);
        Self(format!("<section id=\"{id}\" data-hash=\"{hash}\">{}</section>\n", content.0))
    }

    /// The HTML as text.
    #[cfg(feature = "serve")]
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn push(&mut self, other: Self) {
        self.0.push_str(&other.0);
    }

    /// A page as one file. Its content security policy forbids scripts and external resources.
    pub(crate) fn file(title: &str, body: Self) -> String {
        let head = format!(
            "<meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'unsafe-inline'\">\n<style>\n{STYLE}</style>\n"
        );
        page(title, &head, body)
    }

    /// A page whose style and script are at the given URLs of its server. The server sends the
    /// content security policy as a header.
    #[cfg(feature = "serve")]
    pub(crate) fn served(title: &str, style: &str, script: &str, body: Self) -> String {
        let [style, script] = [style, script].map(escaped);
        let head = format!(
            "<link rel=\"icon\" href=\"data:,\">\n<link rel=\"stylesheet\" href=\"{style}\">\n\
             <script src=\"{script}\" defer></script>\n"
        );
        page(title, &head, body)
    }
}

fn page(title: &str, head: &str, body: Html) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         {head}<title>{}</title>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
        escaped(title),
        body.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let evil = "\"><script>alert('x')</script>";
        let mut body = Html::of("p", evil);
        body.push(Html::heading(1, evil));
        body.push(Html::link(1, evil));
        body.push(Html::table(evil, &[vec![evil.into()], vec![evil.into(), evil.into()]]));
        body.push(Html::details(evil, true, Html::text(evil)));
        body.push(Html::picture(String::new(), evil));
        let page = Html::file(evil, body);
        assert!(!page.contains("<script") && !page.contains("\"><s"), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 12, "{page}");
    }
}
