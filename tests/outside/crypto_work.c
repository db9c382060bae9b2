// Work for libcrypto, AVX-512 code included where the processor has it: ciphers, digests, and two exponentiations modulo
// 1024-bit numbers at once. The library's functions are declared here, so that its headers are not needed.
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct Opaque Opaque;
extern Opaque *EVP_CIPHER_CTX_new(void), *EVP_get_cipherbyname(const char*), *EVP_get_digestbyname(const char*);
extern int EVP_EncryptInit_ex(Opaque*, const Opaque*, Opaque*, const unsigned char*, const unsigned char*);
extern int EVP_EncryptUpdate(Opaque*, unsigned char*, int*, const unsigned char*, int);
extern int EVP_EncryptFinal_ex(Opaque*, unsigned char*, int*);
extern int EVP_Digest(const void*, size_t, unsigned char*, unsigned*, const Opaque*, Opaque*);
extern Opaque *BN_new(void), *BN_CTX_new(void), *BN_bin2bn(const unsigned char*, int, Opaque*);
extern int BN_mod_exp_mont_consttime_x2(Opaque*, const Opaque*, const Opaque*, const Opaque*, Opaque*, Opaque*,
                                        const Opaque*, const Opaque*, const Opaque*, Opaque*, Opaque*);
extern char* BN_bn2hex(const Opaque*);

static unsigned char in[6000], out[6100], key[32] = "key", iv[16] = "start";

static void show(const char* name, const unsigned char* bytes, unsigned n) {
  printf("%s ", name);
  for (unsigned i = 0; i < n; i++) printf("%02x", bytes[i]);
  puts("");
}

static Opaque* number(unsigned seed) {
  unsigned char bytes[128];
  for (unsigned i = 0; i < sizeof bytes; i++)
    bytes[i] = (unsigned char)(seed = seed * 1103515245u + 12345u, seed >> 16);
  bytes[0] |= 0x80, bytes[127] |= 1;
  return BN_bin2bn(bytes, sizeof bytes, NULL);
}

int main(void) {
  for (unsigned i = 0; i < sizeof in; i++) in[i] = (unsigned char)(i * i >> 3);
  const char* ciphers[] = {"aes-128-gcm", "aes-256-ctr",       "aes-128-cbc",
                           "chacha20",    "chacha20-poly1305", "camellia-128-cbc"};
  for (unsigned i = 0; i < sizeof ciphers / sizeof *ciphers; i++)
    for (int size = 7; size <= 6000; size = size * 9 + 100) {
      int n = 0, last = 0;
      Opaque* context = EVP_CIPHER_CTX_new();
      if (!EVP_EncryptInit_ex(context, EVP_get_cipherbyname(ciphers[i]), NULL, key, iv)) return 1;
      EVP_EncryptUpdate(context, out, &n, in, size);
      EVP_EncryptFinal_ex(context, out + n, &last);
      show(ciphers[i], out + n + last - (n + last < 16 ? n + last : 16), n + last < 16 ? (unsigned)(n + last) : 16);
    }
  const char* digests[] = {"sha1", "sha256", "sha512", "sha3-256", "md5", "blake2b512"};
  for (unsigned i = 0; i < sizeof digests / sizeof *digests; i++) {
    unsigned n = 0;
    if (!EVP_Digest(in, sizeof in, out, &n, EVP_get_digestbyname(digests[i]), NULL)) return 1;
    show(digests[i], out, n);
  }
  Opaque *a = BN_new(), *b = BN_new();
  if (!BN_mod_exp_mont_consttime_x2(a, number(1), number(2), number(3), NULL, b, number(4), number(5), number(6), NULL,
                                    BN_CTX_new()))
    return 1;
  printf("%s\n%s\n", BN_bn2hex(a), BN_bn2hex(b));
  return 0;
}
