/* SPDX-License-Identifier: MIT */
/*
 * bench_html.c: a report as one HTML file that needs no other: figures first, then three drawings
 * (speed over length, the roofline, how close the planner's choice comes), then every shape. It
 * follows the reader's light or dark theme.
 */
#include "bench_svg.h"

#include <stdlib.h>
#include <string.h>

static const char style[] =
	":root{--bg:#fff;--fg:#1c2330;--dim:#667085;--line:#e4e7ec;--card:#f8f9fb;--good:#178a50;"
	"--bad:#c0362c;--c0:#2f6fde;--c1:#e0762f;--c2:#2a9d74;--c3:#b4459e;--c4:#8a6d1f;"
	"--c5:#5b54c7;--c6:#0f8fa8;--c7:#c23b58}"
	"@media(prefers-color-scheme:dark){:root{--bg:#12151c;--fg:#e6e9ef;--dim:#98a2b3;"
	"--line:#2a303c;--card:#1a1f29;--good:#4cc38a;--bad:#ef7266;--c0:#6ea0ff;--c1:#ff9f5f;"
	"--c2:#5fd0a5;--c3:#e38ad0;--c4:#d3b45a;--c5:#a09bff;--c6:#54c7dd;--c7:#ff8098}}"
	"*{box-sizing:border-box}body{margin:0 auto;max-width:1120px;padding:32px 24px 64px;"
	"background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}"
	"h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:40px 0 8px}"
	"p{color:var(--dim);margin:4px 0;max-width:75ch}"
	".cards{display:flex;flex-wrap:wrap;gap:12px;margin:20px 0}"
	".card{background:var(--card);border:1px solid var(--line);border-radius:10px;"
	"padding:12px 16px;min-width:150px}.card b{display:block;font-size:22px;"
	"font-variant-numeric:tabular-nums}.card span{color:var(--dim);font-size:13px}"
	"svg{width:100%;height:auto;display:block;margin:8px 0}"
	"svg text{fill:var(--dim);font:12px system-ui,sans-serif}"
	".grid{stroke:var(--line)}.axis{stroke:var(--dim)}"
	"table{border-collapse:collapse;width:100%;font-size:13px;"
	"font-variant-numeric:tabular-nums}"
	"th,td{text-align:right;padding:5px 8px;border-bottom:1px solid var(--line);"
	"vertical-align:top}th:first-child,td:first-child{text-align:left}"
	"th{position:sticky;top:0;background:var(--bg);cursor:pointer}"
	"td small{display:block;color:var(--dim);font-family:ui-monospace,monospace;"
	"word-break:break-all;font-size:11px}.bad{color:var(--bad)}.good{color:var(--good)}";

/* Rows are sorted by the column that is clicked, by its numbers where there are some. */
static const char script[] =
	"document.querySelectorAll('th').forEach(h=>h.onclick=()=>{const t=h.closest('table'),"
	"i=[...h.parentNode.children].indexOf(h),d=h.dataset.d=h.dataset.d=='1'?'-1':'1',"
	"v=r=>{const c=r.children[i];return c.dataset.v?+c.dataset.v:c.textContent};"
	"[...t.tBodies[0].rows].sort((a,b)=>{const x=v(a),y=v(b);return (x>y?1:x<y?-1:0)*d})"
	".forEach(r=>t.tBodies[0].append(r))})";

static void card(FILE *out, const char *label, const char *format, double value)
{
	(void)fputs("<div class=card><b>", out);
	(void)fprintf(out, format, value);
	(void)fprintf(out, "</b><span>%s</span></div>\n", label);
}

static void print_cards(FILE *out, const struct bench_device *device)
{
	struct bench_verdict v;
	double fastest = 0;

	bench_judge(device, &v);
	for (size_t i = 0; i < device->n_rows; i++)
		if (device->rows[i].tflops > fastest)
			fastest = device->rows[i].tflops;
	(void)fputs("<div class=cards>\n", out);
	card(out, "shapes", "%.0f", (double)v.n_shapes);
	card(out, "kernels measured", "%.0f", (double)(device->n_rows - v.n_failed));
	card(out, "highest TFLOP/s", "%.4g", fastest);
	if (device->gbs > 0)
		card(out, "GB/s of a copy", "%.4g", device->gbs);
	if (v.n_shares > 0) {
		card(out, "of the best kernel's speed, on average", "%.1f %%", 100 * v.mean);
		card(out, "at the tenth percentile", "%.1f %%", 100 * v.tenth);
	}
	if (v.n_failed > 0)
		card(out, "not measured", "%.0f", (double)v.n_failed);
	if (v.n_wrong > 0)
		card(out, "wrong results", "%.0f", (double)v.n_wrong);
	(void)fputs("</div>\n", out);
	free(v.shares);
}

static void print_number(FILE *out, const char *format, double value, bool there)
{
	if (!there) {
		(void)fputs("<td>", out);
		return;
	}
	(void)fprintf(out, "<td data-v=%.9g>", value);
	(void)fprintf(out, format, value);
}

/* Columns that have nothing in any row are left out. */
struct columns {
	bool roof, best, result;
};

static struct columns columns_of(const struct bench_best *best, size_t n)
{
	struct columns columns = {0};

	for (size_t i = 0; i < n; i++) {
		const struct bench_row *row = best[i].chosen ? best[i].chosen : best[i].best;

		columns.roof |= row && row->roof > 0;
		columns.best |= best[i].n_measured > 1;
		columns.result |= row && row->allowed > 0;
	}
	return columns;
}

static void print_shape(FILE *out, const struct bench_best *b, const struct columns *columns)
{
	const struct bench_row *row = b->chosen ? b->chosen : b->best;
	double share = b->chosen && b->best ? b->best->median_us / b->chosen->median_us : 0;
	bool wrong = row && row->allowed > 0 && row->error > row->allowed;

	if (!row)
		return;
	(void)fputs("<tr><td>", out);
	html_text(out, row->shape);
	(void)fputs("<small>", out);
	html_text(out, row->kernel);
	if (b->best && b->best != row) {
		(void)fputs("<br>best: ", out);
		html_text(out, b->best->kernel);
	}
	(void)fputs("</small>", out);
	print_number(out, "%.2f", row->median_us, true);
	print_number(out, "%.3g", row->tflops, row->tflops > 0);
	print_number(out, "%.4g", row->gbs, true);
	if (columns->roof)
		print_number(out, "%.0f %%", 100 * row->roof, row->roof > 0);
	if (columns->best) {
		print_number(out, share < 0.95 ? "<span class=bad>%.0f %%</span>" : "%.0f %%",
			     100 * share, b->n_measured > 1 && b->chosen);
		(void)fprintf(out, "<td data-v=%zu>%zu", b->n_measured, b->n_measured);
	}
	if (columns->result)
		(void)fputs(row->allowed <= 0 ? "<td>"
			    : wrong           ? "<td class=bad>wrong"
					      : "<td class=good>ok",
			    out);
	(void)fputc('\n', out);
}

static void bench_html_print_table(FILE *out, const struct bench_device *device)
{
	size_t n = 0;
	struct bench_best *best = bench_best_of(device, &n);
	struct columns columns = columns_of(best, best ? n : 0);

	(void)fprintf(
		out,
		"<h2>Every shape</h2><p>The kernel that the planner takes, and the best one "
		"where that is another. Click a column to sort.</p><table><thead><tr><th>shape"
		"<th>us<th>TFLOP/s<th>GB/s%s%s%s</thead><tbody>\n",
		columns.roof ? "<th>of roof" : "", columns.best ? "<th>of best<th>kernels" : "",
		columns.result ? "<th>result" : "");
	for (size_t i = 0; best && i < n; i++)
		print_shape(out, &best[i], &columns);
	(void)fputs("</tbody></table>\n", out);
	free(best);
}

static void print_failures(FILE *out, const struct bench_device *device)
{
	bool any = false;

	for (size_t i = 0; i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];

		if (!row->failure)
			continue;
		if (!any)
			(void)fputs("<h2>Not measured</h2><table><thead><tr><th>shape<th>reason"
				    "</thead><tbody>\n",
				    out);
		any = true;
		(void)fputs("<tr><td>", out);
		html_text(out, row->shape);
		(void)fputs("<td>", out);
		html_text(out, row->failure);
	}
	if (any)
		(void)fputs("</tbody></table>\n", out);
}

static void print_device(FILE *out, const struct bench_report *report,
			 const struct bench_device *device)
{
	(void)fputs("<h1>", out);
	html_text(out, device->info.name);
	(void)fputs("</h1><p>", out);
	html_text(out, device->info.arch);
	(void)fprintf(out, ", %u units; ", device->info.compute_units);
	html_text(out, device->driver);
	(void)fputs("; ", out);
	html_text(out, device->compiler);
	(void)fputs("</p><p>", out);
	html_text(out, report->server);
	(void)fputs(", ", out);
	html_text(out, report->created);
	(void)fputs(": <code>", out);
	html_text(out, report->command);
	(void)fputs("</code></p>\n", out);
	print_cards(out, device);
	svg_speed(out, device);
	svg_roofline(out, device);
	svg_selection(out, device);
	print_failures(out, device);
	bench_html_print_table(out, device);
}

static void print_html(FILE *out, const void *what)
{
	const struct bench_report *report = what;

	(void)fprintf(out,
		      "<!DOCTYPE html><html lang=en><meta charset=utf-8>"
		      "<meta name=viewport content=\"width=device-width\"><title>fmhactl bench"
		      "</title><style>%s</style><body>\n",
		      style);
	for (size_t i = 0; i < report->n_devices; i++)
		print_device(out, report, &report->devices[i]);
	(void)fprintf(out, "<script>%s</script></body></html>\n", script);
}

int bench_write_html(const struct bench_report *report, const char *path)
{
	return ctl_replace_file(path, print_html, report);
}
