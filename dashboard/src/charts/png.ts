// A chart as a picture for slides and documents.
import { marksPath } from "./marks";
import type { Series } from "./scatter";

const SCALE = 2; // pixels of the picture for one of the page
const LOOKS = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "paint-order",
  "font-size",
  "font-family",
];
const SVG = "http://www.w3.org/2000/svg";
const LEGEND = { left: 72, line: 20, column: 260 };

/** The chart as it is drawn now, with a legend of its series. */
export async function pngOf(svg: SVGSVGElement, series: Series[]): Promise<Blob> {
  const { width, height } = svg.getBoundingClientRect();
  const numColumns = Math.max(1, Math.floor((width - LEGEND.left) / LEGEND.column));
  const shown = series.length > 1 ? series : [];
  const legend = Math.ceil(shown.length / numColumns) * LEGEND.line;
  const copy = svg.cloneNode(true) as SVGSVGElement;
  setAttributes(copy, { xmlns: SVG, width, height: height + legend });
  const drawn = [svg, ...svg.querySelectorAll("*")];
  // a picture has neither the page's style sheet nor its variables: each element gets the values that it has here
  [copy, ...copy.querySelectorAll("*")].forEach((element, index) => {
    const style = getComputedStyle(drawn[index] as Element);
    for (const name of LOOKS) element.setAttribute(name, style.getPropertyValue(name));
  });
  shown.forEach(({ name, look }, index) => {
    const x = LEGEND.left + (index % numColumns) * LEGEND.column;
    const y = height + (Math.floor(index / numColumns) + 0.5) * LEGEND.line;
    const mark = document.createElementNS(SVG, "path");
    setAttributes(mark, { d: marksPath([{ x, y }], look, 4.5), fill: colour(`--series-${look}`) });
    const text = document.createElementNS(SVG, "text");
    const style = getComputedStyle(svg.querySelector("text") ?? svg);
    setAttributes(text, {
      x: x + 10,
      y: y + 4,
      fill: colour("--text"),
      "font-size": 11,
      "font-family": style.fontFamily,
    });
    text.textContent = name;
    copy.append(mark, text);
  });
  return draw(new XMLSerializer().serializeToString(copy), width, height + legend);
}

async function draw(source: string, width: number, height: number): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [SCALE * width, SCALE * height];
  const context = canvas.getContext("2d");
  if (!context) throw new Error("This browser cannot draw images.");
  context.fillStyle = colour("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) =>
    canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("This browser cannot create images.")))),
  );
}

/** The value of a colour of the page in the theme that is shown. */
function colour(variable: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function setAttributes(element: Element, attributes: Record<string, string | number>) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
}
