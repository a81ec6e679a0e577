// The page's half of the feed. It appends points to charts that gr.Plot mounted once, and owns what stands in #status, #sample, #log, #runs.
// Views come pushed (the value of this component, from the page's own Start) or pulled (server.poll); indices make the two mix and gaps heal.
// Inside js_on_load gradio provides: element, props, server, watch.
const CHARTS = { loss: ['train', 'smoothed', 'val'], details: ['lr', 'grad_norm', 'tokens_per_s'] };  // a series' place is its trace
const [BEST, UNIFORM, UNIGRAM, BAD] = [3, 4, 5, 6], OVERLAYS = 7;                                    // further traces of the loss chart; then other runs'
const PUSH_LASTS_MS = 2500, SPACE = location.hostname.endsWith('.hf.space') ? 5 : 1;               // Spaces answer fast polling with 429

let run = null, life = '', view = {}, samples = [], follow = true, counts = {}, nodes = {}, marks = '', slots = [null, null, null, null], laid = '';
let started = { until: 0 }, want = new URLSearchParams(location.search).get('run');  // want: a run to look at, whatever the latest is
let busy = false, misses = 0, polls = 0, pushed = -1e9, pulled = 0, eager = 0, said = '', refreshed = -1e9, filled = {}, planned = '';

const one = selector => document.querySelector(selector);
const put = (selector, text) => { const node = one(selector); if (node && node.textContent !== text) node.textContent = text; };
const attempt = action => { try { return action(); } catch { return null; } };  // what a browser may lack or forbid
const button = state => { const tabs = one('#tabs'); if (tabs) tabs.dataset.run = state; };  // the style sheet shows Train it or Stop
const download = (name, text) => {
  const link = Object.assign(document.createElement('a'), { download: name, href: URL.createObjectURL(new Blob([text])) });
  link.click(); URL.revokeObjectURL(link.href);
};
const nearest = step => samples.reduce((best, sample, index) => Math.abs(sample.step - step) < Math.abs(samples[best].step - step) ? index : best, 0);
const scale = node => Plotly.relayout(node, { 'yaxis.type': one('#log-axis')?.checked ? 'log' : 'linear' });
const otherMean = () => one('#smoothing') && one('#smoothing').value !== '0.8';  // than the server's, which is made from all points

function chart(id) {  // the mounted chart, or null; a new node (gradio drew it again) starts from nothing
  const node = one(`#${id} .js-plotly-plot`);
  if (!window.Plotly || !node || !node._fullLayout || !node.data) return null;
  if (nodes[id] !== node) {
    nodes[id] = node;
    CHARTS[id].forEach(name => delete counts[name]);
    if (id === 'loss') { marks = laid = ''; scale(node); node.on('plotly_click', event => show(nearest(event.points[0].x), true)); }
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', id === 'loss' ? 'Training and validation loss by step' : 'Learning rate, gradient norm and speed by step');
    paint(node);
  }
  return node;
}

function paint(node) {  // plotly cannot read the page's colours by itself
  node.dataset.painted = '1'; Plotly.relayout(node, { 'font.color': getComputedStyle(document.body).getPropertyValue('--body-text-color').trim() || '#888' });
}

function smooth(node) {  // from the drawn points, as the slider asks
  const strength = Number(one('#smoothing').value), { x, y } = node.data[0]; let mean = 0, weight = 0;
  const next = value => { mean = strength * mean + (1 - strength) * value; weight = strength * weight + 1 - strength; return mean / weight; };
  Plotly.restyle(node, { x: [Array.from(x)], y: [Array.from(y, value => value == null ? null : next(value))] }, [1]);
}

function append(id, series) {  // returns false if points are missing in between
  const node = chart(id), [first] = CHARTS[id];
  if (!node || !(series[first] || counts[first])) return !node;  // mounted since the pull asked, without its series
  const x = [], y = [], traces = []; let whole = true;
  CHARTS[id].forEach((name, trace) => {
    const part = series[name], had = counts[name];
    if (!part || (name === 'smoothed' && otherMean())) return;
    const fresh = !had || had[0] !== part.e, known = fresh ? 0 : had[1], count = part.i + part.x.length;
    if (part.i > known) { whole = false; return; }
    if (fresh) Plotly.restyle(node, { x: [part.x], y: [part.y] }, [trace]);
    else if (count > known) { x.push(part.x.slice(known - part.i)); y.push(part.y.slice(known - part.i)); traces.push(trace); }
    counts[name] = [part.e, Math.max(count, known)];
  });
  if (traces.length) Plotly.extendTraces(node, { x, y }, traces);
  if (id === 'loss') { if (otherMean()) smooth(node); delete one('#tabs').dataset.waiting; }
  return whole;
}

function mark() {  // the star, the dashed lines, the place where the loss stopped being a number
  const node = chart('loss'), now = JSON.stringify([run, view.best, view.lines, view.bad, view.max_steps]);
  if (!node || now === marks) return;
  marks = now;
  const level = value => value == null ? [[], []] : [[0, view.max_steps], [value, value]];
  const point = pair => pair ? [[pair[0]], [pair[1]]] : [[], []];
  const known = node.data[1].y.filter(v => v != null);
  const rows = [point(view.best), level(view.lines.uniform), level(view.lines.unigram), point(view.bad == null ? null : [view.bad, known.at(-1) ?? view.lines.uniform])];
  Plotly.restyle(node, { x: rows.map(r => r[0]), y: rows.map(r => r[1]) }, [BEST, UNIFORM, UNIGRAM, BAD]);
}

function show(index, chosen) {  // the sample of a moment; by hand it stays, otherwise the newest is followed
  if (!samples.length) return;
  index = Math.min(Math.max(index, 0), samples.length - 1);
  if (chosen) follow = index === samples.length - 1;
  const slider = one('#age');
  if (slider) { slider.max = samples.length - 1; slider.value = index; slider.setAttribute('aria-valuetext', samples[index].tag); }
  put('#before', samples[0].text); put('#before-tag', samples[0].tag); put('#after', samples[index].text); put('#after-tag', samples[index].tag);
}

function tell() {  // words and buttons; the polite region changes only with the state and with evaluations
  if (!view.live && view.run === started.run && view.life === started.life && performance.now() < started.until) return;  // the server has not answered the click yet
  put('#status .state', view.status); put('#status .numbers', view.numbers);
  if (view.story !== said) { said = view.story; put('#status .story', said); }
  if (one('#status .fill')) one('#status .fill').style.width = `${100 * view.share}%`;
  button(view.live ? (view.state === 'stopping' ? 'stopping' : 'live') : view.state === 'example' || view.empty ? 'example' : 'done');
  document.title = view.live ? `${Math.floor(100 * view.share)} % · MiniGPT` : view.state === 'finished' ? '✓ MiniGPT' : view.state === 'example' ? 'MiniGPT' : `${view.state} · MiniGPT`;
  put('#stop', view.state === 'stopping' ? 'Stopping… press again to skip the final check' : 'Stop');
}

function apply(next) {  // returns false if something is missing that a poll must fetch
  if (next.run === run && next.life === life && next.live && view.live === false) return true;  // pushed before what was pulled since
  if (view.live && !next.live && view.run === next.run && document.hidden) attempt(() => new Notification('MiniGPT', { body: next.story }));
  view = next;
  if (view.run !== run || view.life !== life) {
    if (!run && view.run !== 'example') one('#tabs').dataset.waiting = '';  // the server painted the example's chart: not to be seen
    run = view.run; life = view.life; counts = {}; marks = ''; samples = []; follow = true;
    ['#before', '#after', '#before-tag', '#after-tag'].forEach(place => put(place, '…'));
    for (const id in CHARTS) { const node = chart(id); if (node && view.series[CHARTS[id][0]]) Plotly.restyle(node, { x: CHARTS[id].map(() => []), y: CHARTS[id].map(() => []) }, CHARTS[id].map((_, i) => i)); }
  }
  const complete = view.first <= samples.length;
  if (complete && view.first + view.samples.length > samples.length) {
    samples = samples.slice(0, view.first).concat(view.samples);
    if (follow) show(samples.length - 1, false); else show(Number(one('#age')?.value ?? 0), false);
  }
  tell();
  let whole = complete;
  for (const id in CHARTS) whole = append(id, view.series) && whole;
  mark();
  return whole;
}

async function pull() {
  if (busy) return;
  busy = true; polls++; let whole = true;
  const gone = window.minigpt?.deleted, asked = want ?? (run === gone ? gone : null), late = new Promise((_, fail) => setTimeout(() => fail(Error('late')), 8000));
  try {
    const series = {};  // null: not wanted, its chart is folded away
    for (const id in CHARTS) { const there = chart(id); CHARTS[id].forEach(name => { series[name] = there ? counts[name] ??= [-1, 0] : null; }); }
    if (otherMean()) series.smoothed = null;
    if (!(whole = apply(JSON.parse(await Promise.race([server.poll(JSON.stringify({ want, run, life, series, samples: samples.length })), late]))))) counts = {};
    misses = 0;
    if (asked && run !== asked && asked === (want ?? gone)) {  // deleted, or never there
      visit(null); put('#status .story', `${asked === gone ? 'Deleted' : `There is no run ${asked.slice(0, 60)}`}: this is ${run === 'example' ? 'an example' : 'the latest'}. ${said}`);
    }
  } catch (error) {
    if (++misses > 1) put('#status .state', 'connection lost, trying again; as long as the program runs, so does the training');
  } finally { busy = false; pulled = whole ? performance.now() : -1e9; }
}

function visit(id) {  // look at this run, in the address too; null follows the latest
  const query = new URLSearchParams(location.search);
  if (id) query.set('run', id); else query.delete('run');
  history.replaceState(null, '', String(query) ? `?${query}` : location.pathname);
  want = id; pulled = pushed = -1e9;
}

function fill(selector, html) {  // made by the server, which escapes what people wrote
  if (html == null || filled[selector] === html) return;
  const focused = document.activeElement?.id;
  one(selector).innerHTML = filled[selector] = html; if (focused) document.getElementById(focused)?.focus();
}

async function refresh() {  // what stands around the chart: the list of runs, the ticked ones laid over it, the log if it is unfolded
  const node = chart('loss'), now = JSON.stringify([run, view.live, slots]), draw = Boolean(node) && laid !== now;
  if (!run || misses || document.hidden || (!draw && performance.now() - refreshed < 2000 * SPACE)) return;
  refreshed = performance.now();
  if (draw) laid = now;
  const [runs, log] = await Promise.all([server.runs(JSON.stringify({ run, slots, draw })), one('#log .rows')?.offsetParent ? server.log_table(run) : null]);
  const { rows, traces } = JSON.parse(runs);
  fill('#runs-table .rows', rows); fill('#log .rows', log);
  slots = slots.map(id => id && document.getElementById(`tick-${id}`) ? id : null);  // a deleted run leaves its place
  one('#tabs').dataset.can = one('#runs-table [aria-current]')?.dataset.can ?? '';
  if (planned !== (planned = `${run} ${view.state}`)) one('#more-steps input')?.dispatchEvent(new Event('input', { bubbles: true }));  // draws this run's extension
  if (!traces || laid !== now || chart('loss') !== node) return;
  Plotly.deleteTraces(node, node.data.map((_, index) => index).slice(OVERLAYS));
  Plotly.addTraces(node, traces);
}

function tick() {
  const now = performance.now();
  for (const id in CHARTS) { const before = nodes[id], node = chart(id); if (node && node !== before && run) { pull(); return; } }
  refresh().catch(() => { laid = ''; misses ||= 1; });
  if (window.Plotly) document.querySelectorAll('.js-plotly-plot:not([data-painted])').forEach(node => node._fullLayout && paint(node));
  if (now - pushed < PUSH_LASTS_MS) return;
  const gap = SPACE * (document.hidden ? (view.live ? 5000 : 20000) : view.live || now < eager ? 500 : 1500);
  if (now - pulled >= Math.max(gap, Math.min(gap * 2 ** misses, 20000))) pull();  // where nobody answers, ever more rarely
}

watch('value', () => {
  if (!props.value) return;
  const next = JSON.parse(props.value);
  if (started.here) { started.here = false; if (want) visit(null); }
  if (want && next.run !== want) return;  // another run is looked at meanwhile
  pushed = performance.now(); misses = 0;
  if (!apply(next)) pull();
});
document.addEventListener('input', ({ target }) => {
  const node = chart('loss'), id = target.dataset.tick;
  if (target.id === 'age') show(Number(target.value), true);
  if (target.id === 'log-axis' && node) scale(node);
  if (target.id === 'smoothing' && node) { delete counts.smoothed; if (otherMean()) smooth(node); else pull(); }
  if (id) slots[slots.indexOf(target.checked ? null : id)] = target.checked ? id : null;
});
document.addEventListener('click', async event => {
  if (event.target.closest('#train, #resume, #extend, #restart, #restart-now')) {  // at once, before the server has answered; a refused start is put right by the next poll
    started = { run, life, until: performance.now() + 2500, here: true }; eager = performance.now() + 5000;
    button('starting'); put('#stop', 'Starting…'); put('#status .state', 'starting…'); put('#status .story', said = '');
    attempt(() => Notification.permission === 'default' && Notification.requestPermission());
    if (innerWidth < 900) one('#status')?.scrollIntoView({ behavior: 'smooth' });
  }
  if (event.target.closest('#stop')) { button('stopping'); put('#stop', 'Stopping…'); put('#status .state', 'stopping…'); }
  if (event.target.closest('#csv')) download(`minigpt-${run}.csv`, await server.csv(run));
  const row = event.target.closest('a[data-run]');
  if (row && !event.ctrlKey && !event.metaKey) { event.preventDefault(); visit(row.dataset.run); }
});
new MutationObserver(() => document.querySelectorAll('.js-plotly-plot').forEach(node => delete node.dataset.painted))
  .observe(document.body, { attributes: true, attributeFilter: ['class'] });
setInterval(tick, 250);
pull();
window.addEventListener('online', () => { misses = 0; pull(); });
window.minigpt = { visit, download, refused() { started = { until: 0 }; pull(); }, refresh() { refreshed = pulled = -1e9; }, get polls() { return polls; }, get view() { return view; }, get samples() { return samples; } };
