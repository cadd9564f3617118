// node render.mjs SERIES.json PICTURE.png: draws recorded series (series.py) in headless Chromium.
// CHROMIUM names the browser; default: chromium.
import { build } from 'esbuild';
import { readFileSync, mkdtempSync, writeFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import puppeteer from 'puppeteer-core';

const [series, picture] = process.argv.slice(2);
if (!picture) {
  console.error('usage: node render.mjs SERIES.json PICTURE.png');
  process.exit(2);
}
const here = dirname(fileURLToPath(import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'glm5-picture-'));
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--hide-scrollbars'],
});
try {
  await build({
    entryPoints: [join(here, 'app.jsx')],
    outfile: join(folder, 'app.js'),
    bundle: true,
    minify: true,
    format: 'iife',
    platform: 'browser',
    jsx: 'automatic',
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    loader: { '.svg': 'dataurl', '.ttf': 'empty' },
    logLevel: 'error',
  });
  const data = readFileSync(series, 'utf8').replaceAll('<', '\\u003c');
  const page = join(folder, 'page.html');
  writeFileSync(page, `<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="app.css"><body style="margin:0"><div id="root"></div>
<script>window.PICTURE = ${data}</script><script src="app.js"></script>`);
  const tab = await browser.newPage();
  const faults = [];
  tab.on('pageerror', (fault) => faults.push(fault.message));
  await tab.setViewport({ width: 1640, height: 1200, deviceScaleFactor: 1 });
  await tab.goto(pathToFileURL(page).href);
  await tab.waitForFunction(() => document.title === 'drawn', { timeout: 60000 });
  const drawn = await tab.$('#picture');
  if (!drawn || faults.length) { throw new Error(`the page failed: ${faults.join('; ') || 'nothing was drawn'}`); }
  await drawn.screenshot({ path: picture });
  console.log(`wrote ${picture}`);
} finally {
  await browser.close();
  rmSync(folder, { recursive: true, force: true });
}
