//! Encoder of shapes as PNG, with the font of `embedded-graphics`; no system font is needed.

use std::convert::Infallible;
use std::io::Cursor;

use embedded_graphics::mono_font::{MonoTextStyle, iso_8859_1::FONT_8X13};
use embedded_graphics::pixelcolor::{Rgb888, RgbColor};
use embedded_graphics::prelude::{
    Dimensions, DrawTarget, Drawable, OriginDimensions, Pixel, Point, Primitive, Size,
};
use embedded_graphics::primitives::{Circle, Line, Polyline, PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Baseline, Text, TextStyleBuilder};
use image::{ImageError, ImageFormat, Rgb, RgbImage};

use super::{Anchor, Colour, Picture, Shape};

/// Image that shapes are drawn on.
struct Canvas(RgbImage);

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        Size::new(self.0.width(), self.0.height())
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(
        &mut self,
        pixels: I,
    ) -> Result<(), Infallible> {
        let bounds = self.bounding_box();
        for Pixel(at, colour) in pixels.into_iter().filter(|pixel| bounds.contains(pixel.0)) {
            let rgb = Rgb([colour.r(), colour.g(), colour.b()]);
            self.0.put_pixel(at.x as u32, at.y as u32, rgb);
        }
        Ok(())
    }
}

pub(super) fn encode(picture: &Picture) -> Result<Vec<u8>, ImageError> {
    let [width, height] = picture.size.map(|size| size as u32);
    let mut canvas = Canvas(RgbImage::from_pixel(width, height, Rgb([255; 3])));
    for shape in &picture.shapes {
        let Ok(()) = draw(shape, &mut canvas);
    }
    let mut bytes = Cursor::new(vec![]);
    canvas.0.write_to(&mut bytes, ImageFormat::Png)?;
    Ok(bytes.into_inner())
}

fn draw(shape: &Shape, canvas: &mut Canvas) -> Result<(), Infallible> {
    let point = |[x, y]: [f64; 2]| Point::new(x.round() as i32, y.round() as i32);
    let rgb = |colour: Colour| match colour {
        Colour::Ink => Rgb888::new(60, 60, 60),
        Colour::Grid => Rgb888::new(225, 225, 225),
        Colour::Rgb([r, g, b]) => Rgb888::new(r, g, b),
    };
    match shape {
        Shape::Line { from, to, colour } => Line::new(point(*from), point(*to))
            .into_styled(PrimitiveStyle::with_stroke(rgb(*colour), 1))
            .draw(canvas),
        Shape::Path { points, colour } => {
            let points: Vec<Point> = points.iter().map(|at| point(*at)).collect();
            Polyline::new(&points)
                .into_styled(PrimitiveStyle::with_stroke(rgb(*colour), 2))
                .draw(canvas)
        }
        Shape::Area { from, to, colour } => Rectangle::with_corners(point(*from), point(*to))
            .into_styled(PrimitiveStyle::with_fill(rgb(*colour)))
            .draw(canvas),
        Shape::Disc { centre, radius, colour } => {
            // An odd size has a centre pixel.
            let diameter = 2 * radius.round() as u32 + 1;
            Circle::with_center(point(*centre), diameter)
                .into_styled(PrimitiveStyle::with_fill(rgb(*colour)))
                .draw(canvas)
        }
        Shape::Text { at, anchor, text } => {
            let alignment = match anchor {
                Anchor::Start => Alignment::Left,
                Anchor::Middle => Alignment::Center,
                Anchor::End => Alignment::Right,
            };
            let style =
                TextStyleBuilder::new().alignment(alignment).baseline(Baseline::Middle).build();
            let letters = MonoTextStyle::new(&FONT_8X13, Rgb888::new(0, 0, 0));
            Text::with_text_style(text, point(*at), letters, style).draw(canvas).map(|_| ())
        }
    }
}
