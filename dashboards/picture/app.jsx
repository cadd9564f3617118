// Draws panels of a dashboard from recorded series, with Grafana's own components and theme. Data: window.PICTURE,
// {title, from, to, panels: [{title, unit, kind, stacked, low, high, series: [{name, points: [[seconds, value]]}]}]}.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { createTheme, FieldType, getDisplayProcessor, getDisplayValueAlignmentFactors, dateTime, ThemeContext } from '@grafana/data';
import { BarAlignment, GraphDrawStyle, LegendDisplayMode, LineInterpolation, StackingMode, VisibilityMode } from '@grafana/schema';
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, TimeSeries } from '@grafana/ui';

const theme = createTheme({ colors: { mode: 'light' } });

function frames(panel) {
  return panel.series.map((series, at) => {
    const config = {
      displayName: series.name,
      unit: panel.unit,
      min: panel.low ?? undefined,
      max: panel.high ?? undefined,
      color: { mode: 'palette-classic' },
      custom: {
        drawStyle: GraphDrawStyle.Line,
        lineInterpolation: LineInterpolation.Linear,
        lineWidth: 1,
        fillOpacity: panel.stacked ? 70 : 8,
        showPoints: VisibilityMode.Never,
        barAlignment: BarAlignment.Center,
        spanNulls: false,
        axisPlacement: 'auto',
        scaleDistribution: { type: 'linear' },
        stacking: { mode: panel.stacked || StackingMode.None, group: 'A' },
      },
    };
    const value = {
      name: series.name, type: FieldType.number, config,
      values: series.points.map((point) => point[1]), state: { seriesIndex: at, displayName: series.name },
    };
    value.display = getDisplayProcessor({ field: value, theme });
    const time = { name: 'time', type: FieldType.time, config: {}, values: series.points.map((point) => point[0] * 1000) };
    time.display = getDisplayProcessor({ field: time, theme, timeZone: 'utc' });
    return { refId: 'A', length: series.points.length, fields: [time, value] };
  });
}

function Box({ panel, width, height, children }) {
  return (
    <div style={{ width, height, background: theme.colors.background.primary, border: `1px solid ${theme.colors.border.weak}`,
      borderRadius: 2, overflow: 'hidden', boxSizing: 'border-box' }}>
      <div style={{ font: '500 14px Inter, Helvetica, Arial, sans-serif', padding: '8px 8px 0', height: 28, whiteSpace: 'nowrap' }}>{panel.title}</div>
      {children}
    </div>
  );
}

function Lines({ panel, width, height, range }) {
  return (
    <Box {...{ panel, width, height }}>
      <div style={{ padding: 8 }}>
        <TimeSeries
          frames={frames(panel)} structureRev={1} timeRange={range} timeZone="utc" width={width - 18} height={height - 46}
          legend={{ showLegend: true, displayMode: LegendDisplayMode.List, placement: 'bottom', calcs: [] }} options={{}}
        />
      </div>
    </Box>
  );
}

function spread(values) {
  const real = values.filter(Number.isFinite);
  const [min, max] = [Math.min(0, ...real), Math.max(...real)];
  return { min, max, delta: max - min };
}

function Stat({ panel, width, height }) {
  const [frame] = frames(panel);
  const field = frame.fields[1];
  const last = field.values[field.values.length - 1];
  const value = field.display(last);
  return (
    <Box {...{ panel, width, height }}>
      <BigValue
        value={value} width={width} height={height - 30} theme={theme} colorMode={BigValueColorMode.Value}
        graphMode={BigValueGraphMode.Area} alignmentFactors={getDisplayValueAlignmentFactors([{ display: value }])}
        sparkline={{ x: frame.fields[0], y: { ...field, config: { ...field.config, custom: {} }, state: { ...field.state, range: spread(field.values) } } }}
      />
    </Box>
  );
}

// Grafana's bar chart is a plugin of its server, not a component: these are plain bars with its theme and formatting.
function Bars({ panel, width, height }) {
  const format = frames(panel)[0].fields[1].display;
  const most = Math.max(...panel.series.flatMap((series) => series.points.map((point) => point[1])));
  const names = panel.series[0].points.map((point) => point[0]);
  const colours = ['#73BF69', '#F2CC0C'];
  const tall = height - 100;
  return (
    <Box {...{ panel, width, height }}>
      <div style={{ display: 'flex', gap: 18, padding: '12px 16px 0', alignItems: 'flex-end', font: '12px Inter, Helvetica, Arial, sans-serif' }}>
        {names.map((name) => (
          <div key={name} style={{ flex: 1, textAlign: 'center' }}>
            <div style={{ display: 'flex', gap: 4, alignItems: 'flex-end', height: tall, justifyContent: 'center' }}>
              {panel.series.map((series, at) => {
                const found = series.points.find((point) => point[0] === name);
                if (!found) { return null; }
                const { text, suffix } = format(found[1]);
                return (
                  <div key={at} style={{ flex: 1, maxWidth: 90 }}>
                    <div>{text}{suffix}</div>
                    <div style={{ background: colours[at], height: (tall - 18) * (found[1] / most) }} />
                  </div>
                );
              })}
            </div>
            <div style={{ marginTop: 4, color: theme.colors.text.secondary }}>{name}</div>
          </div>
        ))}
      </div>
      <div style={{ font: '12px Inter, Helvetica, Arial, sans-serif', padding: '6px 16px', display: 'flex', gap: 16 }}>
        {panel.series.map((series, at) => (
          <span key={at}><span style={{ display: 'inline-block', width: 14, height: 4, background: colours[at], marginRight: 6, verticalAlign: 'middle' }} />{series.name}</span>
        ))}
      </div>
    </Box>
  );
}

const KINDS = { lines: Lines, stat: Stat, bars: Bars };
const COLUMN = 66, LINE = 38, GAP = 8;

function Picture({ data }) {
  const range = { from: dateTime(data.from * 1000), to: dateTime(data.to * 1000), raw: { from: 'now-1h', to: 'now' } };
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div id="picture" style={{ background: theme.colors.background.canvas, padding: GAP, width: 24 * COLUMN + GAP, boxSizing: 'content-box' }}>
        <div style={{ font: '500 18px Inter, Helvetica, Arial, sans-serif', padding: '4px 4px 12px' }}>{data.title}</div>
        <div style={{ display: 'flex', flexWrap: 'wrap', gap: GAP }}>
          {data.panels.map((panel, at) => {
            const Kind = KINDS[panel.kind];
            return <Kind key={at} panel={panel} range={range} width={panel.width * COLUMN - GAP} height={panel.height * LINE} />;
          })}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('root')).render(<Picture data={window.PICTURE} />);
setTimeout(() => { document.title = 'drawn'; }, 2500);
