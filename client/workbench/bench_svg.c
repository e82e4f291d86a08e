/* SPDX-License-Identifier: MIT */
#include "bench_svg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

#define WIDTH       1140.0
#define HEIGHT      420.0
#define LEFT        64.0
#define RIGHT       330.0 /* where the legend stands: its longest line has 40 letters */
#define TOP         16.0
#define BOTTOM      48.0
#define N_COLORS    8
#define DECODE_ROWS 16

/* One direction of a drawing: [low, high] in data, on a logarithmic scale where log is set. */
struct axis {
	double low, high;
	bool log;
	const char *title;
};

struct plot {
	FILE *out;
	struct axis x, y;
};

static double share_of(const struct axis *axis, double value)
{
	if (axis->log)
		return (log(value) - log(axis->low)) / (log(axis->high) - log(axis->low));
	return (value - axis->low) / (axis->high - axis->low);
}

static double at_x(const struct plot *plot, double value)
{
	return LEFT + share_of(&plot->x, value) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const struct plot *plot, double value)
{
	return HEIGHT - BOTTOM - share_of(&plot->y, value) * (HEIGHT - TOP - BOTTOM);
}

/* 1, 2, 5, 10, 20, ... of @i = 0, 1, 2, 3, 4, ... */
static double decimal_mark(int i)
{
	static const double steps[] = {1, 2, 5};
	int decade = i >= 0 ? i / 3 : -((2 - i) / 3);

	return steps[i - 3 * decade] * pow(10, decade);
}

/* Marks lie @step apart, or a factor of @step on a logarithmic scale; a step of 10 has 2 and 5 between, where there is
 * room for them. Return: mark @i, or a negative number behind the last one. */
static double tick(const struct axis *axis, double step, int i)
{
	double value;

	if (axis->log && step == 10 && axis->high / axis->low < 1e4) {
		int first = (int)floor(3 * log10(axis->low)) - 2;

		while (decimal_mark(first) < axis->low * 0.9999)
			first++;
		value = decimal_mark(first + i);
	} else if (axis->log) {
		value = pow(step, ceil(log(axis->low) / log(step) - 1e-9) + i);
	} else {
		value = (ceil(axis->low / step - 1e-9) + i) * step;
	}
	return value <= axis->high * 1.0001 ? value : -1;
}

static void draw_ticks(const struct plot *plot, double step_x, double step_y)
{
	double v;

	for (int i = 0; (v = tick(&plot->x, step_x, i)) >= 0; i++) {
		(void)fprintf(plot->out,
			      "<path class=grid d='M%.1f %.1fV%.1f'/><text x=%.1f y=%.1f "
			      "text-anchor=middle>%.6g</text>\n",
			      at_x(plot, v), TOP, HEIGHT - BOTTOM, at_x(plot, v),
			      HEIGHT - BOTTOM + 18, v);
	}
	for (int i = 0; (v = tick(&plot->y, step_y, i)) >= 0; i++) {
		(void)fprintf(plot->out,
			      "<path class=grid d='M%.1f %.1fH%.1f'/><text x=%.1f y=%.1f "
			      "text-anchor=end>%.4g</text>\n",
			      LEFT, at_y(plot, v), WIDTH - RIGHT, LEFT - 8, at_y(plot, v) + 4, v);
	}
}

static void begin(const struct plot *plot, const char *heading, const char *about, double step_x,
		  double step_y)
{
	(void)fprintf(plot->out, "<h2>%s</h2><p>%s</p><svg viewBox='0 0 %.0f %.0f' role=img>\n",
		      heading, about, WIDTH, HEIGHT);
	draw_ticks(plot, step_x, step_y);
	(void)fprintf(
		plot->out,
		"<path class=axis fill=none d='M%.1f %.1fV%.1fH%.1f'/>"
		"<text x=%.1f y=%.1f text-anchor=middle>%s</text>"
		"<text transform='translate(14 %.1f) rotate(-90)' text-anchor=middle>%s</text>"
		"\n",
		LEFT, TOP, HEIGHT - BOTTOM, WIDTH - RIGHT, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8,
		plot->x.title, (TOP + HEIGHT - BOTTOM) / 2, plot->y.title);
}

static void end(const struct plot *plot)
{
	(void)fputs("</svg>\n", plot->out);
}

static void legend(const struct plot *plot, int line, int color, const char *text)
{
	double y = TOP + 10 + 18 * line;

	(void)fprintf(plot->out,
		      "<circle cx=%.1f cy=%.1f r=5 fill='var(--c%d)'/><text x=%.1f y=%.1f>%s"
		      "</text>\n",
		      WIDTH - RIGHT + 20, y - 4, color, WIDTH - RIGHT + 32, y, text);
}

static void point(const struct plot *plot, const struct bench_row *row, double x, double y,
		  int color, bool filled)
{
	(void)fprintf(plot->out, "<circle cx=%.1f cy=%.1f r=4 %s='var(--c%d)'%s><title>",
		      at_x(plot, x), at_y(plot, y), filled ? "fill" : "stroke", color,
		      filled ? " fill-opacity=.75" : " fill=none");
	html_text(plot->out, row->shape);
	(void)fprintf(plot->out, "\n%.4g TFLOP/s, %.4g GB/s, %.2f us\n", row->tflops, row->gbs,
		      row->median_us);
	html_text(plot->out, row->kernel);
	(void)fputs("</title></circle>\n", plot->out);
}

static bool is_drawn(const struct bench_row *row)
{
	return !row->failure && row->chosen && row->tflops > 0;
}

static void widen(struct axis *axis, double value)
{
	if (axis->low == 0 || value < axis->low)
		axis->low = value;
	if (value > axis->high)
		axis->high = value;
}

/* ---- speed over length ---- */

/* Rows of one kind differ in their length alone, as far as a drawing of it goes. */
static void kind_of(const struct bench_row *row, char text[64])
{
	const struct spec_shape *s = &row->sizes;

	(void)snprintf(text, 64, "%s %s d%d%s%s%s", problem_op_words[s->op & 3],
		       bench_dtype_word(s->data_type), s->hdim_q, s->mask ? " masked" : "",
		       s->seqlen_q < DECODE_ROWS && s->op == FMHA_FORWARD ? " decode" : "",
		       s->page_size ? " paged" : "");
}

struct sample {
	const struct bench_row *row;
	char kind[64];
};

static int compare_samples(const void *a, const void *b)
{
	const struct sample *x = a, *y = b;
	int r = strcmp(x->kind, y->kind);

	return r ? r
		 : (x->row->sizes.seqlen_k > y->row->sizes.seqlen_k) -
			       (x->row->sizes.seqlen_k < y->row->sizes.seqlen_k);
}

/* Rows and keys of other numbers are points beside the line. */
static bool is_on_line(const struct bench_row *row)
{
	return row->sizes.seqlen_q == row->sizes.seqlen_k || row->sizes.seqlen_q < DECODE_ROWS;
}

/* One kind: its points, and through the fastest of each length a line. */
static void draw_kind(const struct plot *plot, const struct sample *samples, size_t n, int color)
{
	bool first = true;

	(void)fprintf(plot->out, "<path fill=none stroke-width=2 stroke='var(--c%d)' d='", color);
	for (size_t i = 0; i < n;) {
		int32_t length = samples[i].row->sizes.seqlen_k;
		double most = 0;

		for (; i < n && samples[i].row->sizes.seqlen_k == length; i++)
			if (is_on_line(samples[i].row))
				most = fmax(most, samples[i].row->tflops);
		if (most == 0)
			continue;
		(void)fprintf(plot->out, "%s%.1f %.1f", first ? "M" : "L", at_x(plot, length),
			      at_y(plot, most));
		first = false;
	}
	(void)fputs("'/>\n", plot->out);
	for (size_t i = 0; i < n; i++)
		point(plot, samples[i].row, samples[i].row->sizes.seqlen_k, samples[i].row->tflops,
		      color, true);
}

static size_t same_kind(const struct sample *samples, size_t n)
{
	size_t same = 0;

	while (same < n && !strcmp(samples[same].kind, samples[0].kind))
		same++;
	return same;
}

/* The kinds with most rows are drawn; @ret_starts, in order. */
static int largest_kinds(const struct sample *samples, size_t n, size_t ret_starts[N_COLORS])
{
	size_t sizes[N_COLORS];
	int kinds = 0;

	for (size_t i = 0; i < n; i += same_kind(samples + i, n - i)) {
		size_t size = same_kind(samples + i, n - i);
		int at = kinds < N_COLORS ? kinds++ : N_COLORS;

		for (; at > 0 && sizes[at - 1] < size; at--)
			if (at < N_COLORS) {
				sizes[at] = sizes[at - 1];
				ret_starts[at] = ret_starts[at - 1];
			}
		if (at < N_COLORS) {
			sizes[at] = size;
			ret_starts[at] = i;
		}
	}
	return kinds;
}

void svg_speed(FILE *out, const struct bench_device *device)
{
	struct plot plot = {.out = out,
			    .x = {.log = true, .title = "keys"},
			    .y = {.log = true, .title = "TFLOP/s"}};
	struct sample *samples = calloc(device->n_rows + 1, sizeof(*samples));
	size_t starts[N_COLORS], n = 0;
	int kinds;

	for (size_t i = 0; samples && i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];

		if (!is_drawn(row) || row->sizes.seqlen_k < 1)
			continue;
		samples[n].row = row;
		kind_of(row, samples[n++].kind);
		widen(&plot.x, row->sizes.seqlen_k);
		widen(&plot.y, row->tflops);
	}
	if (n > 1 && plot.x.high > plot.x.low) {
		qsort(samples, n, sizeof(*samples), compare_samples);
		kinds = largest_kinds(samples, n, starts);
		plot.y.high *= 1.3;
		plot.y.low /= 1.3;
		begin(&plot, "Speed over length",
		      "What the planner's choice reaches; the line goes through the fastest "
		      "problem of each length that has as many rows as keys, or few. Hover a point "
		      "to see the problem.",
		      plot.x.high / plot.x.low > 4096 ? 4 : 2, 10);
		for (int i = 0; i < kinds; i++) {
			size_t at = starts[i];

			draw_kind(&plot, samples + at, same_kind(samples + at, n - at), i);
			legend(&plot, i, i, samples[at].kind);
		}
		end(&plot);
	}
	free(samples);
}

/* ---- the roofline ---- */

static void draw_roofs(const struct plot *plot, const struct bench_device *device)
{
	for (size_t i = 0; i < device->n_roofs; i++) {
		const struct bench_roof *roof = &device->roofs[i];
		double ridge = roof->tflops * 1e3 / device->gbs;
		double start = fmin(fmax(plot->x.low, plot->y.low * 1e3 / device->gbs), ridge);

		(void)fprintf(plot->out,
			      "<path fill=none stroke-width=2 stroke-dasharray='6 4' "
			      "stroke='var(--c%zu)' d='M%.1f %.1fL%.1f %.1fH%.1f'/>\n",
			      i % N_COLORS, at_x(plot, start),
			      at_y(plot, start * device->gbs / 1e3), at_x(plot, ridge),
			      at_y(plot, roof->tflops), WIDTH - RIGHT);
		legend(plot, (int)i, (int)(i % N_COLORS), bench_dtype_word((int32_t)roof->dtype));
	}
}

static int color_of_type(const struct bench_device *device, int32_t data_type)
{
	for (size_t i = 0; i < device->n_roofs; i++)
		if (device->roofs[i].dtype == (uint32_t)data_type)
			return (int)(i % N_COLORS);
	return N_COLORS - 1;
}

void svg_roofline(FILE *out, const struct bench_device *device)
{
	struct plot plot = {.out = out,
			    .x = {.log = true, .title = "operations a byte of the least traffic"},
			    .y = {.log = true, .title = "TFLOP/s"}};
	size_t n = 0;

	for (size_t i = 0; i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];

		if (!is_drawn(row))
			continue;
		widen(&plot.x, row->intensity);
		widen(&plot.y, row->tflops);
		n++;
	}
	if (n == 0 || device->n_roofs == 0 || device->gbs == 0)
		return;
	for (size_t i = 0; i < device->n_roofs; i++) {
		widen(&plot.x, device->roofs[i].tflops * 1e3 / device->gbs);
		widen(&plot.y, device->roofs[i].tflops);
	}
	plot.x.low /= 1.5;
	plot.x.high *= 1.5;
	plot.y.low /= 1.5;
	plot.y.high *= 1.5;
	begin(&plot, "Roofline",
	      "The dashed roofs are measured: a copy's bandwidth on the slope, the fastest "
	      "attention without a mask on the flat. What lies above the slope found its tensors "
	      "in "
	      "the caches. Filled: forward; rings: backward and others.",
	      10, 10);
	draw_roofs(&plot, device);
	for (size_t i = 0; i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];

		if (is_drawn(row))
			point(&plot, row, row->intensity, row->tflops,
			      color_of_type(device, row->sizes.data_type),
			      row->sizes.op == FMHA_FORWARD);
	}
	end(&plot);
}

/* ---- the choice ---- */

void svg_selection(FILE *out, const struct bench_device *device)
{
	struct plot plot = {.out = out,
			    .x = {.title = "chosen kernel's speed, % of the best one's"},
			    .y = {.low = 0, .high = 100, .title = "% of shapes"}};
	struct bench_verdict v;

	bench_judge(device, &v);
	if (v.n_shares > 1) {
		double least = floor(10 * v.worst) * 10;

		plot.x.low = least < 90 ? least : 90;
		plot.x.high = 100;
		begin(&plot, "How good the choice is",
		      "The share of shapes whose chosen kernel is at most that fast, compared with "
		      "the best of all kernels that were measured. A step at the far right is "
		      "perfect.",
		      plot.x.low < 50 ? 10 : 5, 20);
		(void)fprintf(out,
			      "<path fill=none stroke-width=2.5 stroke='var(--c0)' d='M%.1f %.1f",
			      at_x(&plot, plot.x.low), at_y(&plot, 0));
		for (size_t i = 0; i < v.n_shares; i++)
			(void)fprintf(out, "H%.1fV%.1f", at_x(&plot, 100 * v.shares[i]),
				      at_y(&plot, 100 * (double)(i + 1) / (double)v.n_shares));
		(void)fputs("'/>\n", out);
		end(&plot);
	}
	free(v.shares);
}

void html_text(FILE *out, const char *text)
{
	for (; text && *text; text++) {
		switch (*text) {
		case '<':
			(void)fputs("&lt;", out);
			break;
		case '>':
			(void)fputs("&gt;", out);
			break;
		case '&':
			(void)fputs("&amp;", out);
			break;
		case '"':
			(void)fputs("&quot;", out);
			break;
		default:
			(void)fputc(*text, out);
		}
	}
}
