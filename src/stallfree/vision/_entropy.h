/* Entropy decoding of baseline JPEGs (ITU-T T.81, annex F.2.2), which replaces libjpeg's. It takes two thirds of the
 * decoding time, and no bit can be skipped. Here a value costs one table lookup and no unpredictable branch; in unused
 * parts of an image, one lookup decodes several values. The result equals libjpeg's, bit by bit.
 *
 * libjpeg has no interface for this. But the first two fields of its entropy decoder are functions, in libjpeg 6 and in
 * all of its successors; this is checked before one is replaced. libjpeg decodes the rare kinds: progressive images,
 * arithmetic coding, restart markers, several scans. It decodes everything if a test on built-in images finds a
 * difference at the first use of the library (see entropy.py).
 */
#include <dlfcn.h>

#define LOOK 10
#define SLOTS (1 << LOOK)
#define MOST_CODE 16 /* bits */

/* The meaning of the next LOOK bits, if they begin with a complete code: the bits of code and value (in 6 bits), the
 * zeros before the value (in 8 bits), and the bits of the value (in 4 bits); 0 if the code is longer. The end of a
 * block is represented as OUT zeros, sixteen zeros as fifteen zeros and a zero value. */
#define LENGTH(entry) ((int)((entry) & 63))
#define RUN(entry) ((int)((entry) >> 6 & 255))
#define SIZE(entry) ((int)((entry) >> 14))
#define OUT 128

/* The meaning of the next SKIP bits, for all values that they contain completely: the number of their bits (in 5 bits),
 * and the number of positions that they fill, OUT or more if the block ends with them. */
#define SKIP 11

typedef struct {
    JHUFF_TBL source; /* the table that this one was built from */
    int is_dc, made;
    uint32_t codes[SLOTS];
    uint16_t skips[1 << SKIP];
    int32_t most[MOST_CODE + 1], offset[MOST_CODE + 1]; /* largest code of each length, and the index of its symbol */
} Codes;

typedef struct {
    uint64_t buffer; /* the next bits, from the most significant one */
    int count;       /* number of these bits */
    int made_up;     /* number of zeros among them that follow the end of the data */
    const uint8_t *at, *end;
} Bits;

typedef struct {
    Bits bits;
    const Codes *dc[MAX_COMPS_IN_SCAN], *ac[MAX_COMPS_IN_SCAN];
    unsigned last[MAX_COMPS_IN_SCAN]; /* DC values */
    unsigned column, first, most;     /* the next MCU of its row; the range of requested MCUs */
} Entropy;

/* The first fields of libjpeg's entropy decoder. */
typedef struct {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
} Replaced;

/* The positions of the values of a block, which are stored in zigzag order. */
static const uint8_t in_rows[64] = {
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* -- tables -------------------------------------------------------------------------------------------------------- */

static uint32_t entry_of(int symbol, int length, int is_dc) {
    int run = is_dc ? 0 : symbol >> 4, size = is_dc ? symbol : symbol & 15;
    if (!is_dc && !size && run < 15) run = OUT;
    return (uint32_t)(length + size) | (uint32_t)run << 6 | (uint32_t)size << 14;
}

static uint16_t skip_of(const uint32_t *codes, unsigned look) {
    int length = 0, far = 0;
    while (far < OUT) {
        uint32_t entry = codes[(look << length & ((1 << SKIP) - 1)) >> (SKIP - LOOK)];
        int code = LENGTH(entry) - SIZE(entry);
        if (!entry || length + code > SKIP || (RUN(entry) < OUT && far + RUN(entry) > 62)) break;
        far += RUN(entry) + (RUN(entry) < OUT);
        length += LENGTH(entry);
        if (length >= SKIP) break;
    }
    return (uint16_t)(length | far << 5);
}

static int make_codes(Codes *codes, const JHUFF_TBL *source, int is_dc) {
    if (codes->made && codes->is_dc == is_dc && !memcmp(codes->source.bits, source->bits, sizeof source->bits) &&
        !memcmp(codes->source.huffval, source->huffval, sizeof source->huffval))
        return 1;
    codes->made = 0;
    memset(codes->codes, 0, sizeof codes->codes);
    int32_t code = 0, number = 0;
    for (int length = 1; length <= MOST_CODE; length++, code <<= 1) {
        codes->offset[length] = number - code;
        for (int n = source->bits[length]; n > 0; n--, code++, number++) {
            if (code >= 1 << length || number > 255 || (is_dc && source->huffval[number] > 15)) return 0;
            if (length > LOOK) continue;
            unsigned first = (unsigned)code << (LOOK - length);
            for (unsigned look = first; look < first + (1u << (LOOK - length)); look++)
                codes->codes[look] = entry_of(source->huffval[number], length, is_dc);
        }
        codes->most[length] = source->bits[length] ? code - 1 : -1;
    }
    for (unsigned look = 0; !is_dc && look < 1 << SKIP; look++) codes->skips[look] = skip_of(codes->codes, look);
    codes->source = *source, codes->is_dc = is_dc, codes->made = 1;
    return 1;
}

/* -- bits ---------------------------------------------------------------------------------------------------------- */

/* By value, so that callers can keep the bits in registers. */
static __attribute__((noinline)) Bits filled_slowly(Bits there) {
    Bits *bits = &there;
    bits->buffer &= bits->count ? ~(uint64_t)0 << (64 - bits->count) : 0;
    for (; bits->count <= 56; bits->count += 8) {
        const uint8_t *at = bits->at;
        int stuffed = bits->end - at > 1 && at[0] == 0xff && at[1] == 0;
        if (at == bits->end || (at[0] == 0xff && !stuffed)) { /* a marker, or the end of the data */
            bits->made_up += 8;
            continue;
        }
        bits->buffer |= (uint64_t)at[0] << (56 - bits->count);
        bits->at += 1 + stuffed;
    }
    return there;
}

/* Refill to 32 bits or more. */
INLINE void fill(Bits *bits) {
    if (bits->count >= 32) return;
    if (bits->end - bits->at >= 8) {
        uint64_t next;
        memcpy(&next, bits->at, 8);
        if (!((~next - 0x0101010101010101) & next & 0x8080808080808080)) { /* no byte is 0xff */
            bits->buffer |= __builtin_bswap64(next) >> bits->count;
            bits->at += (63 - bits->count) >> 3;
            bits->count |= 56;
            return;
        }
    }
    *bits = filled_slowly(*bits);
}

INLINE unsigned peek(const Bits *bits, int count) { return (unsigned)(bits->buffer >> (64 - count)); }

INLINE void drop(Bits *bits, int count) { bits->buffer <<= count, bits->count -= count; }

/* The entry for the next code of any length; 0 for an invalid code. */
INLINE uint32_t next_entry(const Bits *bits, const Codes *codes) {
    uint32_t entry = codes->codes[peek(bits, LOOK)];
    if (__builtin_expect(entry != 0, 1)) return entry;
    for (int length = LOOK + 1; length <= MOST_CODE; length++) {
        int32_t code = (int32_t)peek(bits, length);
        if (code <= codes->most[length])
            return entry_of(codes->source.huffval[(code + codes->offset[length]) & 255], length, codes->is_dc);
    }
    return 0;
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

/* The value that follows the code of `entry`: values that begin with a 0 bit are negative. */
INLINE int value_of(const Bits *bits, uint32_t entry) {
    int size = SIZE(entry);
    uint64_t left = bits->buffer << (LENGTH(entry) - size);
    int negative = (int)(left >> 63) - 1;
    return (int)(left >> 1 >> (63 - size)) + (negative & (1 - (1 << size)));
}

/* Decode the AC values of a block to `block`, if not NULL. Returns 0 if they are invalid. */
INLINE int read_values(Bits *bits, const Codes *codes, JCOEF *block) {
    for (int k = 1; k < 64; k++) {
        fill(bits);
        if (!block) {
            uint16_t skip = codes->skips[peek(bits, SKIP)];
            int far = skip >> 5;
            if (__builtin_expect(far && k + (far & (OUT - 1)) <= 63 + (far < OUT), 1)) {
                drop(bits, skip & 31);
                if (far >= OUT) return 1;
                k += far - 1;
                continue;
            }
        }
        uint32_t entry = next_entry(bits, codes);
        k += RUN(entry);
        if (k > 63 || !entry) {
            drop(bits, LENGTH(entry));
            return k >= OUT;
        }
        if (block) block[in_rows[k]] = (JCOEF)value_of(bits, entry);
        drop(bits, LENGTH(entry));
    }
    return 1;
}

/* Replaces libjpeg's function: decode the blocks of one MCU, which are zero on entry; NULL to skip them. */
static boolean decode_blocks(j_decompress_ptr jpeg, JBLOCKROW *blocks);

INLINE int read_blocks(j_decompress_ptr jpeg, Entropy *entropy, JBLOCKROW *blocks) {
    Bits bits = entropy->bits;
    for (int n = 0; n < jpeg->blocks_in_MCU; n++) {
        int which = jpeg->MCU_membership[n];
        fill(&bits);
        uint32_t entry = next_entry(&bits, entropy->dc[which]);
        if (!entry) return 0;
        entropy->last[which] += (unsigned)value_of(&bits, entry);
        drop(&bits, LENGTH(entry));
        if (blocks) (*blocks[n])[0] = (JCOEF)entropy->last[which];
        if (!read_values(&bits, entropy->ac[which], blocks ? *blocks[n] : NULL)) return 0;
    }
    entropy->bits = bits;
    return bits.count >= bits.made_up;
}

static int of_libjpeg(void (*function)(void)) {
    Dl_info own, its;
    return function && dladdr((void *)jpeg_read_header, &own) && dladdr((void *)function, &its) &&
           own.dli_fbase == its.dli_fbase;
}

/* Install this entropy decoding for an image whose decompression has started; `count` columns from `from` on are
 * requested. Returns 0 if this is impossible, and libjpeg's decoding stays in place. */
static int take_over(j_decompress_ptr jpeg, Entropy *entropy, JDIMENSION from, JDIMENSION count) {
    static __thread Codes known[2][NUM_HUFF_TBLS];
    Replaced *replaced = (Replaced *)jpeg->entropy;
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->restart_interval || jpeg->data_precision != 8 ||
        jpeg_has_multiple_scans(jpeg) || jpeg->comps_in_scan != jpeg->num_components ||
        !of_libjpeg((void (*)(void))replaced->start_pass) || !of_libjpeg((void (*)(void))replaced->decode_mcu))
        return 0;
    for (int which = 0; which < jpeg->comps_in_scan; which++) {
        int dc = jpeg->cur_comp_info[which]->dc_tbl_no, ac = jpeg->cur_comp_info[which]->ac_tbl_no;
        if (dc < 0 || dc >= NUM_HUFF_TBLS || ac < 0 || ac >= NUM_HUFF_TBLS) return 0;
        const JHUFF_TBL *sources[2] = {jpeg->dc_huff_tbl_ptrs[dc], jpeg->ac_huff_tbl_ptrs[ac]};
        if (!sources[0] || !sources[1] || !make_codes(&known[0][dc], sources[0], 1) ||
            !make_codes(&known[1][ac], sources[1], 0))
            return 0;
        entropy->dc[which] = &known[0][dc], entropy->ac[which] = &known[1][ac];
    }
#if JPEG_LIB_VERSION >= 70
    unsigned wide = (unsigned)jpeg->min_DCT_h_scaled_size;
#else
    unsigned wide = (unsigned)jpeg->min_DCT_scaled_size;
#endif
    if (jpeg->comps_in_scan > 1) wide *= (unsigned)jpeg->max_h_samp_factor;
    entropy->first = from / wide, entropy->most = (from + count - 1) / wide;
    entropy->bits.at = jpeg->src->next_input_byte;
    entropy->bits.end = entropy->bits.at + jpeg->src->bytes_in_buffer;
    replaced->decode_mcu = decode_blocks;
    return 1;
}
