/* Images of 3 bytes per pixel: partial JPEG decoding and resizing, both directly into the memory of the result.
 * Called by ctypes without the GIL; every function is thread-safe.
 *
 * Resizing is bilinear with antialiasing, with the weights of Pillow and torch: a triangle as wide as the scale, and at
 * least 1 pixel to each side. Weights have 16 bits, sums have 8 bits and 8 bits of fraction. So a product is the upper
 * half of a 16-bit multiplication, which every vector unit supports. Rows are summed first, at the lowest cost per
 * pixel; then columns, two pixels (6 of 8 lanes) at a time.
 */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 1005000
#error "libjpeg-turbo 1.5 or newer is needed: other libjpegs cannot decode a part of a picture"
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lanes are moved as on little-endian processors"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(NO_CLONES)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define ABI 4 /* equal to ABI in crops.py */
#define LANES 8
#define SPARE 2 /* minimum ratio between the sides decoded at a lower resolution and those of the result */
#define MOST_TAPS 128 /* each product loses half a 256th: with more products, the error would be visible */
#define MOST_SIDE 65500 /* the maximum of a JPEG */
#define MOST_PIXELS 178956970 /* the maximum of Pillow */

enum { DONE = 0, UNREADABLE = 1, NO_MEMORY = 2, BAD_ARGUMENT = 3 };

typedef uint16_t Lanes __attribute__((vector_size(2 * LANES)));
typedef uint64_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

EXPORT int stallfree_abi(void) { return ABI; }

/* -- weights ------------------------------------------------------------------------------------------------------- */

typedef struct {
    int taps;          /* source pixels per result pixel, the same number for all */
    int *first;        /* position of the first source pixel; for columns, in bytes */
    uint16_t *weights; /* in units of 1/65536: `taps` per pixel; for columns, LANES per pair of pixels */
} Filter;

static void free_filter(Filter *filter) {
    free(filter->first);
    free(filter->weights);
}

/* Weights with a sum of 65535, so that no sum exceeds 16 bits; the rounding error is added to the largest weight. */
static void to_integers(const double *share, int taps, double total, uint16_t *weights) {
    int sum = 0, largest = 0;
    for (int k = 0; k < taps; k++) {
        weights[k] = (uint16_t)(share[k] / total * 65535 + 0.5);
        sum += weights[k];
        if (weights[k] > weights[largest]) largest = k;
    }
    weights[largest] = (uint16_t)(weights[largest] + 65535 - sum);
}

/* The weights of `out` pixels, evenly spaced over `extent` pixels from `start`, made of the pixels `low` to `high`.
 * `columns`: for add_columns, each pair of pixels has 3 times the one weight, 3 times the other, and zeros. */
static int make_filter(Filter *filter, double start, double extent, int low, int high, int out, int columns,
                       int mirror) {
    double scale = extent / out, wide = scale > 1 ? scale : 1;
    int taps = wide < high - low ? (int)ceil(2 * wide) : high - low;
    if (taps > high - low) taps = high - low;
    if (taps > MOST_TAPS) return BAD_ARGUMENT;
    size_t each = columns ? (size_t)(taps + 1) / 2 * LANES : (size_t)taps;
    double *share = malloc(sizeof(double) * (size_t)taps);
    uint16_t *plain = malloc(sizeof(uint16_t) * (size_t)taps);
    filter->taps = taps;
    filter->first = malloc(sizeof(int) * (size_t)out);
    filter->weights = calloc((size_t)out * each, sizeof(uint16_t));
    int fine = share && plain && filter->first && filter->weights;
    for (int i = 0; fine && i < out; i++) {
        double centre = start + (i + 0.5) * scale, total = 0;
        int first = (int)floor(centre - wide - 0.5) + 1; /* the first pixel whose centre is nearer than `wide` */
        if (first > high - taps) first = high - taps;
        if (first < low) first = low;
        for (int k = 0; k < taps; k++) {
            double away = fabs(first + k + 0.5 - centre) / wide;
            share[k] = away < 1 ? 1 - away : 0;
            total += share[k];
        }
        to_integers(share, taps, total, plain);
        int place = mirror ? out - 1 - i : i;
        uint16_t *weights = filter->weights + (size_t)place * each;
        filter->first[place] = columns ? 3 * first : first;
        for (int k = 0; k < taps; k++) {
            if (!columns) weights[k] = plain[k];
            for (int c = 0; columns && c < 3; c++) weights[k / 2 * LANES + k % 2 * 3 + c] = plain[k];
        }
    }
    free(share);
    free(plain);
    return fine ? DONE : NO_MEMORY;
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */

INLINE uint16_t upper(uint16_t a, uint16_t b) { return (uint16_t)((uint32_t)a * b >> 16); }

INLINE uint16_t part(uint8_t value, uint16_t weight) { return upper((uint16_t)(value << 8), weight); }

INLINE void first_rows(const uint8_t *restrict one, const uint8_t *restrict two, uint16_t a, uint16_t b, int length,
                       uint16_t *restrict sum) {
    for (int i = 0; i < length; i++) sum[i] = (uint16_t)(part(one[i], a) + part(two[i], b));
}

INLINE void more_rows(const uint8_t *restrict one, const uint8_t *restrict two, uint16_t a, uint16_t b, int length,
                      uint16_t *restrict sum) {
    for (int i = 0; i < length; i++) sum[i] = (uint16_t)(sum[i] + part(one[i], a) + part(two[i], b));
}

/* sum = rows[0] * weights[0] + rows[1] * weights[1] + ..., each of `length` bytes. */
FOR_EACH_PROCESSOR
static void add_rows(const uint8_t *const *rows, const uint16_t *weights, int taps, int length, uint16_t *sum) {
    first_rows(rows[0], rows[taps > 1], weights[0], taps > 1 ? weights[1] : 0, length, sum);
    for (int k = 2; k + 1 < taps; k += 2) more_rows(rows[k], rows[k + 1], weights[k], weights[k + 1], length, sum);
    if (taps > 2 && taps % 2) more_rows(rows[taps - 1], rows[taps - 1], weights[taps - 1], 0, length, sum);
}

/* A row of pixels from `sum`, which has space for LANES values after its end; `out` has space for one byte. */
INLINE void add_pairs(const uint16_t *sum, const Filter *filter, int pairs, int width, uint8_t *out) {
    const uint16_t *weights = filter->weights;
    for (int x = 0; x < width; x++, out += 3) {
        const uint16_t *from = sum + filter->first[x];
        Lanes total = {0};
        for (int k = 0; k < pairs; k++, from += 6, weights += LANES) {
            Lanes a, b;
            memcpy(&a, from, sizeof a);
            memcpy(&b, weights, sizeof b);
#pragma GCC unroll 1 /* unrolling would prevent the conversion of this loop to one instruction */
            for (int i = 0; i < LANES; i++) a[i] = upper(a[i], b[i]);
            total += a;
        }
        Halves halves = (Halves)total, second = {halves[1], 0};
        total += (Lanes)(halves >> 48 | second << 16); /* lanes 3 to 5 to lanes 0 to 2 */
        Bytes bytes = __builtin_convertvector((total + 128) >> 8, Bytes);
        memcpy(out, &bytes, 4); /* the fourth is overwritten by the next pixel */
    }
}

FOR_EACH_PROCESSOR
static void add_columns(const uint16_t *sum, const Filter *filter, int width, uint8_t *out) {
    int pairs = (filter->taps + 1) / 2;
    if (pairs == 1) /* common numbers as constants: faster */
        add_pairs(sum, filter, 1, width, out);
    else if (pairs == 2)
        add_pairs(sum, filter, 2, width, out);
    else
        add_pairs(sum, filter, pairs, width, out);
}

/* -- resizing ------------------------------------------------------------------------------------------------------ */

typedef struct {
    uint8_t *at;
    int height, width;
    int planar; /* planar output (CHW), else interleaved (HWC) */
    int mirror; /* whether to mirror left to right */
} Target;

/* The state of resizing from rows of `width` pixels. Initially zero; freed by free_work. */
typedef struct {
    Filter down, across;
    int width;
    uint16_t *sum;
    uint8_t *line;
    const uint8_t **rows;
} Work;

static void free_work(Work *work) {
    free_filter(&work->down);
    free_filter(&work->across);
    free(work->sum);
    free(work->line);
    free(work->rows);
}

typedef struct {
    double start, extent; /* the requested part */
    int low, high;        /* its source pixels */
} Span;

static int make_work(Work *work, Span vertical, Span horizontal, int width, const Target *target) {
    work->width = width;
    int problem = make_filter(&work->down, vertical.start, vertical.extent, vertical.low, vertical.high,
                              target->height, 0, 0);
    if (!problem)
        problem = make_filter(&work->across, horizontal.start, horizontal.extent, horizontal.low, horizontal.high,
                              target->width, 1, target->mirror);
    if (problem) return problem;
    work->sum = calloc(3 * (size_t)width + LANES, sizeof(uint16_t));
    work->line = malloc(3 * (size_t)target->width + 1);
    work->rows = malloc(sizeof(uint8_t *) * (size_t)work->down.taps);
    return work->sum && work->line && work->rows ? DONE : NO_MEMORY;
}

FOR_EACH_PROCESSOR
static void part_colours(const uint8_t *restrict line, size_t width, uint8_t *restrict out, size_t plane) {
    for (size_t c = 0; c < 3; c++)
        for (size_t x = 0; x < width; x++) out[c * plane + x] = line[3 * x + c];
}

/* Row `y` of the result from work->rows. */
static void put_row(Work *work, int y, const Target *target) {
    size_t width = (size_t)target->width, plane = (size_t)target->height * width;
    add_rows(work->rows, work->down.weights + (size_t)y * (size_t)work->down.taps, work->down.taps, 3 * work->width,
             work->sum);
    add_columns(work->sum, &work->across, target->width, work->line);
    if (target->planar)
        part_colours(work->line, width, target->at + (size_t)y * width, plane);
    else
        memcpy(target->at + (size_t)y * width * 3, work->line, width * 3);
}

static int bad_sides(int height, int width) {
    return height < 1 || width < 1 || height > MOST_SIDE || width > MOST_SIDE;
}

/* Resize `height` x `width` pixels, with `stride` bytes per row, to `out_height` x `out_width` at `out`. BAD_ARGUMENT
 * if the result is smaller than a 64th of a side. */
EXPORT int stallfree_resize(const uint8_t *pixels, int64_t stride, int height, int width, int out_height, int out_width,
                            int planar, int mirror, uint8_t *out) {
    if (bad_sides(height, width) || bad_sides(out_height, out_width)) return BAD_ARGUMENT;
    Target target = {out, out_height, out_width, planar, mirror};
    Work work = {0};
    int problem = make_work(&work, (Span){0, height, 0, height}, (Span){0, width, 0, width}, width, &target);
    for (int y = 0; !problem && y < out_height; y++) {
        for (int k = 0; k < work.down.taps; k++) work.rows[k] = pixels + (work.down.first[y] + k) * stride;
        put_row(&work, y, &target);
    }
    free_work(&work);
    return problem;
}

/* -- JPEG ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf way_out;
    Work work;
    uint8_t *ring; /* the last decoded rows */
    int problem;
} Decoder;

static void leave(j_common_ptr jpeg) { longjmp(((Decoder *)jpeg->client_data)->way_out, 1); }

static void leave_if_damaged(j_common_ptr jpeg, int level) {
    if (level < 0) leave(jpeg); /* a warning: the data are damaged, and libjpeg would invent the rest */
}

static void say_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void begin(Decoder *decoder, const uint8_t *data, size_t size) {
    jpeg_create_decompress(&decoder->jpeg);
    jpeg_mem_src(&decoder->jpeg, data, size);
    jpeg_read_header(&decoder->jpeg, TRUE);
}

/* Below, `low` to `high` are the pixels of the scaled image that the requested part needs. */
static Span span_of(int start, int extent, int eighths, int most) {
    Span span = {start * eighths / 8.0, extent * eighths / 8.0, start * eighths / 8, 0};
    span.high = (int)ceil(span.start + span.extent);
    if (span.high > most) span.high = most;
    return span;
}

static void decode(Decoder *decoder, int top, int left, int height, int width, const Target *target) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    Work *work = &decoder->work;
    int eighths = 8;
    while (eighths > 1 && (int64_t)height * eighths >= (int64_t)target->height * 8 * 2 * SPARE &&
           (int64_t)width * eighths >= (int64_t)target->width * 8 * 2 * SPARE)
        eighths /= 2;
    jpeg->scale_num = (unsigned)eighths;
    jpeg->scale_denom = 8;
    jpeg->out_color_space = JCS_RGB;
    jpeg_start_decompress(jpeg);
    Span vertical = span_of(top, height, eighths, (int)jpeg->output_height);
    Span horizontal = span_of(left, width, eighths, (int)jpeg->output_width);
    /* One more pixel on each side, because colours are smoothed: the pixels then equal those of the whole image. */
    JDIMENSION from = (JDIMENSION)(horizontal.low > 0 ? horizontal.low - 1 : 0);
    JDIMENSION count = (JDIMENSION)horizontal.high + 1 - from;
    if (count > jpeg->output_width - from) count = jpeg->output_width - from;
    jpeg_crop_scanline(jpeg, &from, &count);
    horizontal.start -= from, horizontal.low -= (int)from, horizontal.high -= (int)from;
    decoder->problem = make_work(work, vertical, horizontal, (int)count, target);
    if (decoder->problem) return;
    size_t stride = 3 * (size_t)count, taps = (size_t)work->down.taps;
    decoder->ring = malloc(stride * taps);
    if (!decoder->ring) {
        decoder->problem = NO_MEMORY;
        return;
    }
    int done = work->down.first[0];
    if (done > 0) jpeg_skip_scanlines(jpeg, (JDIMENSION)done);
    for (int y = 0; y < target->height; y++) {
        int first = work->down.first[y];
        for (; done < first + work->down.taps; done++) {
            JSAMPROW row = decoder->ring + (size_t)done % taps * stride;
            if (jpeg_read_scanlines(jpeg, &row, 1) != 1) {
                decoder->problem = UNREADABLE;
                return;
            }
        }
        for (size_t k = 0; k < taps; k++) work->rows[k] = decoder->ring + ((size_t)first + k) % taps * stride;
        put_row(work, y, target);
    }
}

/* Decode `data`: only its `size` (height, width) if `target` is NULL, else a part of the image. */
static int run(const uint8_t *data, size_t length, int size[2], int top, int left, int height, int width,
               const Target *target) {
    Decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder) return NO_MEMORY;
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->jpeg.client_data = decoder;
    decoder->errors.error_exit = leave;
    decoder->errors.emit_message = leave_if_damaged;
    decoder->errors.output_message = say_nothing;
    if (setjmp(decoder->way_out)) {
        decoder->problem = UNREADABLE;
    } else {
        begin(decoder, data, length);
        size[0] = (int)decoder->jpeg.image_height, size[1] = (int)decoder->jpeg.image_width;
        if ((int64_t)size[0] * size[1] > MOST_PIXELS)
            decoder->problem = UNREADABLE;
        else if (target && (top < 0 || left < 0 || height > size[0] - top || width > size[1] - left))
            decoder->problem = BAD_ARGUMENT;
        else if (target)
            decode(decoder, top, left, height, width, target);
    }
    int problem = decoder->problem;
    jpeg_destroy_decompress(&decoder->jpeg);
    free_work(&decoder->work);
    free(decoder->ring);
    free(decoder);
    return problem;
}

/* Height and width of a JPEG. */
EXPORT int stallfree_jpeg_size(const uint8_t *data, size_t length, int size[2]) {
    return run(data, length, size, 0, 0, 0, 0, NULL);
}

/* Decode `height` x `width` pixels of a JPEG at (`top`, `left`), resized to `out_height` x `out_width`, to `out`. */
EXPORT int stallfree_decode(const uint8_t *data, size_t length, int top, int left, int height, int width,
                            int out_height, int out_width, int planar, int mirror, uint8_t *out) {
    if (bad_sides(height, width) || bad_sides(out_height, out_width)) return BAD_ARGUMENT;
    Target target = {out, out_height, out_width, planar, mirror};
    int size[2];
    return run(data, length, size, top, left, height, width, &target);
}
