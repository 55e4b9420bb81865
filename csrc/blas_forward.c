/* The CBLAS functions that MLX calls, forwarded to the library that exactspec_openblas chooses.
 *
 * Loaded with RTLD_GLOBAL before MLX, it is where the dynamic linker finds these names first. The
 * library behind it is loaded locally, so that none of its other names reach the process. */

/* Set before the first call. */
void (*exactspec_sgemm)(int, int, int, int, int, int, float, const float*, int, const float*, int,
                        float, float*, int);
void (*exactspec_dgemm)(int, int, int, int, int, int, double, const double*, int, const double*,
                        int, double, double*, int);
void (*exactspec_cgemm)(int, int, int, int, int, int, const void*, const void*, int, const void*,
                        int, const void*, void*, int);

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  exactspec_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha,
                 const double* a, int lda, const double* b, int ldb, double beta, double* c,
                 int ldc) {
  exactspec_dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha,
                 const void* a, int lda, const void* b, int ldb, const void* beta, void* c,
                 int ldc) {
  exactspec_cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
